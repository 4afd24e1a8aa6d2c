"""From resampled groups to the batches of a step: advantages over the kept siblings, rows, mini-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rocstar.learning.advantages import advantages
from rocstar.types import Batch, BatchRow, Resampled, Trajectory


def kept_advantages(resampled: Resampled, normalize_by_std: bool) -> dict[int, float]:
    """Advantage of each kept trajectory by its position in the group; empty when nothing was kept."""
    places = [choice.index for choice in resampled.choices if choice.kept]
    if len(places) < 2:
        return {}
    rewards = resampled.group.rewards_G
    return dict(zip(places, advantages([rewards[i] for i in places], normalize_by_std), strict=True))


def rows_of(groups: Sequence[Resampled], normalize_by_std: bool) -> tuple[BatchRow, ...]:
    """One row per kept trajectory, groups in order. Tool tokens stay in the row and carry no loss."""
    return tuple(
        _row(resampled.group.trajectories[place], advantage, identity(number, place))
        for number, resampled in enumerate(groups)
        for place, advantage in kept_advantages(resampled, normalize_by_std).items()
    )


def identity(group: int, place: int) -> str:
    """Which attempt of a step a row is; a problem may stand in it twice, so its id does not tell."""
    return f"{group}/{place}"


def split(rows: Sequence[BatchRow], parts: int, seed: int) -> list[Batch]:
    """Shuffle and cut into at most `parts` batches of nearly equal size, none of them empty."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    parts = min(parts, len(order))
    return [Batch(rows=tuple(order[part::parts])) for part in range(parts)]


def _row(trajectory: Trajectory, advantage: float, name: str) -> BatchRow:
    return BatchRow(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        sampled_logprobs=trajectory.sampled_logprobs,
        advantage=advantage,
        identity=name,
    )
