"""Cold-start learning: it imitates, repeats itself exactly, and keeps its schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import SftSection
from rocstar.learning.optimizers import warm_up_and_decay
from rocstar.learning.sft import SftLearner
from tests.learning import examples
from tests.learning.examples import policy, sft_rows

BASE = {"optimizer": "muon", "adamw_learning_rate": 3e-3, "warmup_steps": 2, "decay": "linear", "decay_share": 0.4}


def learner(steps: int = 30, **section: Any) -> SftLearner:
    return SftLearner(policy(), SftSection(**{**BASE, "context_loss_weight": 0.1, **section}), steps=steps)


def next_token_losses(model: Any, ids_NT: torch.Tensor) -> torch.Tensor:
    """The naive form: [N, T - 1], -log p of token t + 1 given all before it, nats."""
    everything = torch.log_softmax(model(input_ids=ids_NT, use_cache=False).logits[:, :-1].float(), -1)
    return -everything.gather(2, ids_NT[:, 1:, None]).squeeze(2)


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
    other.restore(tmp_path)
    assert other.update(sft_rows(), seed=1) == mine.update(sft_rows(), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(other), parameters(mine), strict=True))


def test_dropout_follows_from_its_seed() -> None:
    losses = [learner(dropout=0.3).update(sft_rows(), seed=seed)["loss"] for seed in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]
    assert learner().update(sft_rows(), seed=5) == learner().update(sft_rows(), seed=6)


def test_dropout_ends_with_the_update() -> None:
    mine, row = learner(dropout=0.5), sft_rows()[0]
    mine.update(sft_rows(), seed=0)
    first, second = (mine.numbers([row.token_ids], [row.loss_mask])[0] for _ in range(2))
    assert first == second


def test_the_schedule_warms_up_stays_and_falls_to_zero() -> None:
    def factors(steps: int, places: range, **section: Any) -> list[float]:
        schedule = warm_up_and_decay(steps, SftSection(**section))
        return [schedule(done) for done in places]

    line = factors(10, range(11), warmup_steps=4, decay="linear", decay_share=0.5)
    assert line == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])
    curve = factors(10, range(11), warmup_steps=0, decay="cosine")
    assert curve == pytest.approx([0.5 + 0.5 * math.cos(math.pi * done / 10) for done in range(11)])
    assert factors(30, range(0, 30, 29), warmup_steps=0, decay_share=0.0) == [1, 1]


def test_the_learning_rate_is_among_the_metrics() -> None:
    mine = learner(optimizer="adamw", warmup_steps=4)
    rates = [mine.update(sft_rows(), seed=0)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3, 3e-3])


def test_the_loss_told_is_the_mean_over_assistant_tokens() -> None:
    mine, model = learner(), examples.model()
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

    model, rows = examples.model(), sft_rows(2)
    values = next_token_losses(model, torch.tensor([row.token_ids for row in rows]))
    mask = torch.tensor([row.loss_mask[1:] for row in rows]).float()
    weights = mask + 0.3 * (1 - mask)
    ((values * weights).sum() / weights.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient(0.3), expected, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(gradient(0.0), expected, atol=1e-4)


def test_an_update_says_how_many_of_its_tokens_are_learnt_from() -> None:
    mine, rows, seen = learner(tokens_per_microbatch=1), sft_rows(), []

    def loss_of(micro: Any, logprobs: Any) -> Any:
        seen.append(mine._policy.learnt)
        return lambda logprobs_C, entropies_C, chunk: -logprobs_C.sum()

    counted = [[place > 0 for place in range(len(row.token_ids))] for row in rows]
    mine._update([row.token_ids for row in rows], counted, loss_of, {"loss": torch.zeros(())})
    total = sum(len(row.token_ids) for row in rows)
    assert len(seen) > 1 and seen == sorted(set(seen)) and seen[0] == (0, total)
    assert mine._policy.learnt == (total, total)
