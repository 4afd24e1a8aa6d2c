"""Rows of drawn log-probabilities, and what our losses make of them: beside the code of other frameworks."""

from __future__ import annotations

import pytest
import torch

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import loss_weights
from rocstar.learning.methods import LOSSES, counts_by_attempt
from rocstar.protocols import PolicyTokens
from rocstar.types import BatchRow, RowOrigin

LENGTHS = (1, 7, 40, 12, 25, 3)
LARGEST: dict[tuple[str, str], tuple[float, float]] = {}
"""(method, reference) -> largest difference of losses and of gradients."""


def drawn(seed: int, spread: float) -> tuple[torch.Tensor, ...]:
    """Logprobs, old ones, advantages and mask, [rows, longest]; what the mask leaves out is noise."""
    chance = torch.Generator().manual_seed(seed)
    shape = len(LENGTHS), max(LENGTHS)
    old = -4 * torch.rand(shape, generator=chance, dtype=torch.double) - 0.01
    new = (old + spread * torch.randn(shape, generator=chance, dtype=torch.double)).clamp(max=-5e-3)
    rows = torch.randn(len(LENGTHS), 1, generator=chance, dtype=torch.double).expand(shape)
    return new, old, rows.contiguous(), (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()


def tokens_of(rows: tuple[torch.Tensor, ...], own: torch.Tensor, sampled: torch.Tensor | None = None) -> PolicyTokens:
    """own: the logprobs with a gradient; sampled: those of the engine, else the old ones."""
    _, old, advantages, mask = rows
    kept = mask.bool()
    return PolicyTokens(
        logprobs=own[kept],
        old_logprobs=old[kept],
        sampled_logprobs=(old if sampled is None else sampled)[kept],
        advantages=advantages[kept],
        attempts=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    )


def ours(
    settings: LearningSection, mean: str, rows: tuple[torch.Tensor, ...], sampled: torch.Tensor | None = None
) -> tuple[float, torch.Tensor]:
    """The loss of what `drawn` gave, and its gradient by logprobs, [rows, longest]."""
    new, _, advantages, _ = rows
    own = new.clone().requires_grad_()
    tokens, name = tokens_of(rows, own, sampled), str(settings.loss)
    batch = [
        row(place, float(advantage), logprobs[: LENGTHS[place]].tolist())
        for place, (advantage, logprobs) in enumerate(zip(advantages[:, 0], new, strict=True))
    ]
    losses = LOSSES[name](tokens, settings)[0] * counts_by_attempt(tokens, settings)
    weights = torch.tensor(loss_weights(batch, mean), dtype=torch.double)
    total = (losses * weights[tokens.attempts]).sum() / sum(LENGTHS)
    (gradient,) = torch.autograd.grad(total, own)
    return total.item(), gradient


def row(place: int, advantage: float, logprobs: list[float]) -> BatchRow:
    return BatchRow(
        token_ids=[0] * len(logprobs),
        loss_mask=[True] * len(logprobs),
        sampled_logprobs=[0.0] * len(logprobs),
        advantage=advantage,
        old_logprobs=logprobs,
        origin=RowOrigin(place),
    )


def compare(method: str, reference: str, own: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    """Losses and gradients (of advantages or weights: these alone) are the same to 1e-6; the table tells by how much
    they differ."""
    differences = abs(own[0] - theirs[0]), (own[1] - theirs[1]).abs().max().item()
    loss, gradient = LARGEST.get((method, reference), (0.0, 0.0))
    LARGEST[method, reference] = max(loss, differences[0]), max(gradient, differences[1])
    assert own[0] == pytest.approx(theirs[0], abs=1e-6)
    torch.testing.assert_close(own[1], theirs[1], atol=1e-6, rtol=1e-6)
