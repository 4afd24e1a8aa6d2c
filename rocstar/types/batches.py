"""What one optimizer step learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """[T] the learner's own numbers before the first update of the step, of the full softmax after temperature, 0 where
    the policy wrote nothing; filled in by `Learner.score`, or by `Learner.update` for a row that was not scored."""
    entropies: Sequence[float] = ()
    """[T] entropy of the same distribution, nats; filled in likewise."""
    identity: str = ""
    """Which attempt of the step it is (`learning.batches.identity`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step learns from."""

    rows: tuple[BatchRow, ...]

    @property
    def num_loss_tokens(self) -> int:
        """The denominator of the whole step, known before the first backward pass."""
        return sum(sum(row.loss_mask) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update came to."""

    metrics: Mapping[str, float]
    """loss, grad_norm, clip_share, kl, learning_rate, skipped (1: weights were left alone), tokens (of all rows); with
    `learning.importance_cap` importance_weight (mean) and importance_capped (share of tokens)."""
    rows: tuple[BatchRow, ...]
    """The batch's rows, scored."""
