"""What one optimizer step learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One sequence to learn from, still in plain Python; `learning.pack` makes tensors of it."""

    token_ids: Sequence[int]
    """[T]."""
    loss_mask: Sequence[bool]
    """[T] true on tokens the policy wrote."""
    sampled_logprobs: Sequence[float]
    """[T] the engine's numbers."""
    advantage: float
    """Same for every token of the row; no unit."""
    old_logprobs: Sequence[float] = ()
    """[T] the learner's own numbers before the first update of the step; filled in by `Learner.score`."""
    entropies: Sequence[float] = ()
    """[T] natural-log entropy of the distribution each token was drawn from; filled in by `Learner.score`."""
    identity: str = ""
    """`problem_id/index`, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step learns from."""

    rows: tuple[BatchRow, ...]

    @property
    def num_loss_tokens(self) -> int:
        """The denominator of the whole step, known before the first backward pass."""
        return sum(sum(row.loss_mask) for row in self.rows)
