"""Advantages: reward relative to the siblings that train together. Not here: which siblings those are
(`resample.py`) and how tokens share an advantage (`BatchRow.advantage`, the same for every token)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

STD_FLOOR = 1e-6  # added to the deviation, as in the release; nothing beside the 0.24 of one success in sixteen


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
    scale = _unbiased_deviation(differences_G) + STD_FLOOR if normalize_by_std else 1.0
    return tuple(difference / scale for difference in differences_G)


def _unbiased_deviation(differences_G: Sequence[float]) -> float:
    squares = sum(difference * difference for difference in differences_G)
    return float((squares / (len(differences_G) - 1)) ** 0.5)
