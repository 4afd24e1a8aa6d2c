"""From resampled groups to the batches of a step: advantages over the kept siblings, rows, mini-batches.

Loads no torch. Not here: which siblings are kept (`resample.py`)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rocstar.config.sections import LearningSection
from rocstar.errors import ConfigError, ContractBroken
from rocstar.protocols import Advantage
from rocstar.support.plugins import named, own_code
from rocstar.types import BatchRow, Resampled, RowOrigin

STD_FLOOR = 1e-6  # added to the deviation, as in the release; small against the 0.24 of one success in sixteen
GroupAdvantages = Callable[[Sequence[float]], Sequence[float]]
"""Rewards of a group's kept attempts -> their advantages."""


def advantages(rewards_G: Sequence[float], normalize_by_std: bool = True) -> tuple[float, ...]:
    """[G], no unit: reward minus group mean, over the group's standard deviation; zeros when rewards are equal.

    The group is the kept one, after resampling (paper §2.2.1). The paper does not say which deviation it means;
    ours is the release's: unbiased (over G - 1), plus 1e-6. `normalize_by_std=False` leaves the plain difference.
    Raises ValueError under two rewards: one attempt has nothing to be compared with."""
    if len(rewards_G) < 2:
        raise ValueError(f"advantages need at least two siblings, got {len(rewards_G)}; drop the group instead")
    if len(set(rewards_G)) == 1:
        return (0.0,) * len(rewards_G)
    mean = fmean(rewards_G)
    differences_G = [reward - mean for reward in rewards_G]
    squares = sum(difference * difference for difference in differences_G)
    deviation = float((squares / (len(differences_G) - 1)) ** 0.5)
    scale = deviation + STD_FLOOR if normalize_by_std else 1.0
    return tuple(difference / scale for difference in differences_G)


def grpo(rewards_G: Sequence[float], settings: LearningSection) -> tuple[float, ...]:
    """`rows_of` divides by the deviation of the whole batch, since it sees all groups."""
    return advantages(rewards_G, bool(settings.normalize_by_std) and not settings.over_batch)


def rloo(rewards_G: Sequence[float], settings: LearningSection) -> tuple[float, ...]:
    """Reward minus the mean of the others (RLOO, arXiv 2402.14740)."""
    total, others = math.fsum(rewards_G), len(rewards_G) - 1
    return tuple(reward - (total - reward) / others for reward in rewards_G)


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "rloo": rloo}
"""By their names in a recipe; tests/contracts/test_advantage.py runs over them."""


def advantage_of(settings: LearningSection, folders: Sequence[Path | str] = ()) -> GroupAdvantages:
    """The function that `learning.advantage` names, under these settings. folders: where the user's modules are.

    Raises ConfigError if no such function exists or it does not return one finite number per reward: checked now on two
    rewards, and later on those of each step."""
    setting, takes = f"learning.advantage = {settings.advantage!r}", ("rewards", "settings")
    found = named(settings.advantage, ADVANTAGES, setting="learning.advantage", takes=takes, folders=folders)

    def checked(rewards_G: Sequence[float]) -> tuple[float, ...]:
        *others, last = (f"{reward:g}" for reward in rewards_G)
        with own_code(f"{setting} failed on the rewards {', '.join(others)} and {last}", found):
            given = _plain(found(rewards_G, settings))
            several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
            values = tuple(map(_plain, given)) if several else ()
            finite = [isinstance(one, Real) and not isinstance(one, bool) and math.isfinite(one) for one in values]
        if len(values) != len(rewards_G) or not all(finite):
            raise ConfigError(
                f"{setting} returned {values or given!r} for the rewards {tuple(rewards_G)}; return one number for each"
            )
        return tuple(map(float, values))

    checked((1.0, 0.0))
    return checked


def _plain(given: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python values."""
    return given.tolist() if hasattr(given, "tolist") else given


def kept_advantages(resampled: Resampled, advantage: GroupAdvantages) -> dict[int, float]:
    """Advantage of each kept trajectory by its position in the group; empty when nothing was kept."""
    places = [choice.index for choice in resampled.choices if choice.kept]
    if len(places) < 2:
        return {}
    rewards = resampled.group.rewards_G
    return dict(zip(places, advantage([rewards[i] for i in places]), strict=True))


def rows_of(
    groups: Sequence[Resampled], advantage: GroupAdvantages, *, over_batch: bool = False
) -> tuple[BatchRow, ...]:
    """One row per conversation of a kept trajectory, groups in order; most have one. Tool tokens stay in the row and
    carry no loss. over_batch: advantages are divided by the deviation of all kept rewards (Lite PPO, arXiv
    2508.08221)."""
    rewards = [group.group.rewards_G[choice.index] for group in groups for choice in group.choices if choice.kept]
    scale = stdev(rewards) + STD_FLOOR if over_batch and rewards else 1.0
    return tuple(
        BatchRow(
            token_ids=conversation.token_ids,
            loss_mask=conversation.loss_mask,
            sampled_logprobs=conversation.sampled_logprobs,
            advantage=value / scale,
            origin=RowOrigin(number, place, part),
        )
        for number, resampled in enumerate(groups)
        for place, value in kept_advantages(resampled, advantage).items()
        for part, conversation in enumerate(resampled.group.trajectories[place].conversations)
    )


def loss_weights(rows: Sequence[BatchRow], mean: str) -> list[float]:
    """[N] weight of each token of a row, so that every question, or attempt, of an update counts the same whatever its
    length; weights average 1 over tokens, and all are 1 where every token counts the same. Source: paper, eq. 6, which
    divides by the tokens of each question's kept attempts, then averages over questions; for attempts, GRPO (arXiv
    2402.03300). Raises ContractBroken for two rows of one origin."""
    if mean == "tokens":
        return [1.0] * len(rows)
    if len({row.origin for row in rows}) < len(rows):
        raise ContractBroken("two rows of an update have the same origin, so rows can't be matched to questions")
    alike = [row.origin[: 1 if mean == "questions" else 2] for row in rows]
    tokens: Counter[tuple[int, ...]] = Counter()
    for name, row in zip(alike, rows, strict=True):
        tokens[name] += sum(row.loss_mask)
    share = tokens.total() / sum(count > 0 for count in tokens.values())
    return [share / max(1, tokens[name]) for name in alike]


def split(rows: Sequence[BatchRow], parts: int, seed: int) -> list[tuple[BatchRow, ...]]:
    """Shuffle and cut into at most `parts` batches of nearly equal size, none of them empty."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    parts = min(parts, len(order))
    return [tuple(order[part::parts]) for part in range(parts)]


def top_entropy(rows: Sequence[BatchRow], share: float) -> tuple[BatchRow, ...]:
    """Restrict the loss to this share of each row's policy tokens, those of highest entropy; at least one per row. Rows
    must be scored. Source: arXiv 2506.01939; the release has a switch for it, off by default."""
    found = []
    for row in rows:
        places = [place for place, mine in enumerate(row.loss_mask) if mine]
        highest = sorted(places, key=row.entropies.__getitem__, reverse=True)
        kept = set(highest[: max(1, round(share * len(places)))])
        found.append(replace(row, loss_mask=tuple(place in kept for place in range(len(row.loss_mask)))))
    return tuple(found)
