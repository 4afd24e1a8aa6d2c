"""A loss, an advantage and a resampler of your own:

    rocstar train recipe.toml learning.loss=own_learning:cispo learning.advantage=own_learning:leave_one_out \\
        resample.method=own_learning:Balanced
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocstar.learning.resample import Fate, resampled
from rocstar.types import Group, Reason, Resampled

if TYPE_CHECKING:  # a check of a recipe (--dry-run) then needs no torch for the other two
    import torch

    from rocstar.config.sections import LearningSection, ResampleSection
    from rocstar.protocols import PolicyTokens


def cispo(tokens: PolicyTokens, settings: LearningSection) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (arXiv 2506.13585): the ratio is clipped above and carries no gradient, so every token keeps one."""
    ratio = (tokens.logprobs - tokens.old_logprobs).detach().clamp(max=10.0).exp()
    most = 1 + settings.clip_high
    return -ratio.clamp(max=most) * tokens.advantages * tokens.logprobs, ratio > most


def leave_one_out(rewards: Sequence[float], settings: LearningSection) -> list[float]:
    """RLOO (arXiv 2402.14740): reward minus the mean of the siblings' rewards."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


class Balanced:
    """As many right attempts as wrong ones, at most `resample.keep` in all, drawn uniformly."""

    def __init__(self, settings: ResampleSection) -> None:
        self._settings = settings

    def __call__(self, group: Group, rng: random.Random) -> Resampled:
        return resampled(group, rng, self._choose, self._settings)

    def _choose(self, right: Sequence[bool], penalties: Sequence[float], rng: random.Random) -> list[Fate]:
        """Asked for the attempts that can be compared, where their rewards are unequal."""
        places = [[n for n, it in enumerate(right) if it is kind] for kind in (True, False)]
        each = min(self._settings.keep // 2, *map(len, places))
        kept = {n for some in places for n in rng.sample(some, each)}
        return [(Reason.KEPT_UNIFORM if n in kept else Reason.DROPPED_UNIFORM, 1.0) for n in range(len(right))]
