"""Rows of drawn log-probabilities, and what our losses make of them: beside the code of other frameworks."""

from __future__ import annotations

import torch

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import loss_weights
from rocstar.learning.methods import LOSSES
from rocstar.protocols import PolicyTokens
from rocstar.types import BatchRow

LENGTHS = (1, 7, 40, 12, 25, 3)


def drawn(seed: int, spread: float) -> tuple[torch.Tensor, ...]:
    """Logprobs, old ones, advantages and mask, [rows, longest]; what the mask leaves out is noise."""
    chance = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    old = -4 * torch.rand(shape, generator=chance, dtype=torch.double) - 0.01
    new = (old + spread * torch.randn(shape, generator=chance, dtype=torch.double)).clamp(max=-5e-3)
    rows = torch.randn(len(LENGTHS), 1, generator=chance, dtype=torch.double).expand(shape)
    return new, old, rows.contiguous(), (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()


def ours(settings: LearningSection, mean: str, rows: tuple[torch.Tensor, ...]) -> tuple[float, torch.Tensor]:
    """The loss of what `drawn` gave, and its gradient by logprobs, [rows, longest]."""
    new, old, advantages, mask = rows
    kept, own = mask.bool(), new.clone().requires_grad_()
    attempts = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    tokens = PolicyTokens(
        logprobs=own[kept],
        old_logprobs=old[kept],
        sampled_logprobs=old[kept],
        advantages=advantages[kept],
        attempts=attempts,
    )
    losses, _ = LOSSES[settings.loss](tokens, settings)
    weights = loss_weights([row(count) for count in LENGTHS], mean)
    if weights is not None:
        losses = losses * torch.tensor(weights, dtype=torch.double)[attempts]
    total = losses.sum() / sum(LENGTHS)
    (gradient,) = torch.autograd.grad(total, own)
    return total.item(), gradient


def row(count: int) -> BatchRow:
    return BatchRow(token_ids=[0] * count, loss_mask=[True] * count, sampled_logprobs=[0.0] * count, advantage=1.0)
