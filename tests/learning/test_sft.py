"""Cold-start learning: it imitates, repeats itself exactly, and keeps its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.learning.sft import SftLearner, SftSettings, next_token_losses
from tests.learning.examples import policy, sft_rows


def learner(**settings: Any) -> SftLearner:
    return SftLearner(policy(), SftSettings(**{"steps": 30, "warmup_steps": 2, **settings}))


def parameters(learner: SftLearner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner._policy.parameters]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_few_rows_are_learned_by_heart(optimizer: str) -> None:
    mine = learner(optimizer=optimizer)
    losses = [mine.update(sft_rows(), seed=step)["loss"] for step in range(30)]
    assert losses[-1] < 0.6 * losses[0]
    assert mine._policy.version == 30


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_restored_learner_goes_on_to_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    mine, other = learner(optimizer=optimizer, dropout=0.2), learner(optimizer=optimizer, dropout=0.2)
    mine.update(sft_rows(), seed=0)
    mine.save(tmp_path)
    other._policy.model.load_state_dict(mine._policy.model.state_dict())
    other.restore(tmp_path)
    assert other.update(sft_rows(), seed=1) == mine.update(sft_rows(), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(other), parameters(mine), strict=True))


def test_dropout_follows_from_its_seed() -> None:
    losses = [learner(dropout=0.3).update(sft_rows(), seed=seed)["loss"] for seed in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]
    assert learner().update(sft_rows(), seed=5) == learner().update(sft_rows(), seed=6)


def test_dropout_ends_with_the_update() -> None:
    mine = learner(dropout=0.5)
    mine.update(sft_rows(), seed=0)
    ids = torch.tensor([sft_rows()[0].token_ids])
    mine._policy.model.train()
    assert torch.equal(next_token_losses(mine._policy.model, ids), next_token_losses(mine._policy.model, ids))


def test_the_schedule_warms_up_stays_and_falls_to_zero() -> None:
    mine = learner(steps=10, warmup_steps=4, decay_share=0.5)
    factors = [mine._schedule(done) for done in range(10)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert [learner(warmup_steps=0, decay_share=0.0)._schedule(done) for done in (0, 29)] == [1, 1]


def test_the_loss_told_is_the_mean_over_assistant_tokens() -> None:
    mine, model = learner(), policy().model
    rows = sft_rows(3)
    values = next_token_losses(model, torch.tensor([row.token_ids for row in rows]))
    mask = torch.tensor([row.loss_mask[1:] for row in rows])
    assert mine.update(rows, seed=0)["loss"] == pytest.approx(values[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_micro_batches_do_not_change_the_gradient(budget: int) -> None:
    mine, whole = (learner(tokens_per_microbatch=size, max_grad_norm=1e9) for size in (budget, 10_000))
    for each in (mine, whole):
        each.update(sft_rows(), seed=0)
    for a, b in zip(mine._policy.parameters, whole._policy.parameters, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


def test_context_tokens_count_as_much_as_the_settings_say() -> None:
    def gradient(weight: float) -> torch.Tensor:
        mine = learner(context_loss_weight=weight, max_grad_norm=1e9)
        mine.update(sft_rows(2), seed=0)
        return torch.cat([p.grad.flatten() for p in mine._policy.parameters])

    model, rows = policy().model, sft_rows(2)
    values = next_token_losses(model, torch.tensor([row.token_ids for row in rows]))
    mask = torch.tensor([row.loss_mask[1:] for row in rows]).float()
    weights = mask + 0.3 * (1 - mask)
    ((values * weights).sum() / weights.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient(0.3), expected, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(gradient(0.0), expected, atol=1e-4)
