"""From resampled groups to the batches of a step: advantages over the kept siblings, rows, mini-batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

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


def question_weights(rows: Sequence[BatchRow]) -> list[float]:
    """[N] weight of each token of a row by which every question of an update counts alike however long its attempts
    are; 1 in the mean over tokens. Source: paper, eq. 6, which divides by the tokens of each question's kept attempts
    and then takes the mean over questions."""
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[_question_of(row)] += sum(row.loss_mask)
    share = tokens.total() / sum(count > 0 for count in tokens.values())
    return [share / max(1, tokens[_question_of(row)]) for row in rows]


def _question_of(row: BatchRow) -> str:
    return row.identity.rpartition("/")[0]


def split(rows: Sequence[BatchRow], parts: int, seed: int) -> list[Batch]:
    """Shuffle and cut into at most `parts` batches of nearly equal size, none of them empty."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    parts = min(parts, len(order))
    return [Batch(rows=tuple(order[part::parts])) for part in range(parts)]


def top_entropy(batch: Batch, share: float) -> Batch:
    """Loss on this share of each row's policy tokens alone, those of the highest entropy; at least one of each row.
    Rows must be scored. Source: arXiv 2506.01939; the release has it as a switch that is off."""
    return replace(batch, rows=tuple(_of_top_entropy(row, share) for row in batch.rows))


def _of_top_entropy(row: BatchRow, share: float) -> BatchRow:
    places = [place for place, mine in enumerate(row.loss_mask) if mine]
    kept = set(sorted(places, key=lambda place: -row.entropies[place])[: max(1, round(share * len(places)))])
    return replace(row, loss_mask=tuple(place in kept for place in range(len(row.loss_mask))))


def _row(trajectory: Trajectory, advantage: float, name: str) -> BatchRow:
    return BatchRow(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        sampled_logprobs=trajectory.sampled_logprobs,
        advantage=advantage,
        identity=name,
    )
