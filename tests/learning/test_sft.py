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
from tests.learning.examples import assert_gradients, naive_values, policy, same_weights, sft_rows

BASE = {"optimizer": "muon", "adamw_learning_rate": 3e-3, "warmup_steps": 2, "decay": "linear", "decay_share": 0.4}


def learner(steps: int = 30, **section: Any) -> SftLearner:
    return SftLearner(policy(), SftSection(**{**BASE, "context_loss_weight": 0.1, **section}), steps=steps)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_few_rows_are_learned_by_heart(optimizer: str) -> None:
    mine = learner(optimizer=optimizer)
    told = [mine.update(sft_rows(), seed=step) for step in range(30)]
    losses, rates = ([each[name] for each in told] for name in ("loss", "learning_rate"))
    assert rates[:4] == pytest.approx([1.5e-3, 3e-3, 3e-3, 3e-3]) or optimizer == "muon"
    assert losses[-1] < 0.6 * losses[0]
    assert mine._policy.version == 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_restored_learner_goes_on_to_the_same_bits(tmp_path: Path, optimizer: str, dtype: str) -> None:
    mine, other = (learner(optimizer=optimizer, dropout=0.2, moments_dtype=dtype) for _ in range(2))
    mine.update(sft_rows(), seed=0)
    mine.save(tmp_path)
    other.restore(tmp_path)
    assert other.update(sft_rows(), seed=1) == mine.update(sft_rows(), seed=1)
    assert same_weights(other._policy, mine._policy)


def test_dropout_follows_from_its_seed_and_ends_with_the_update() -> None:
    losses = [learner(dropout=0.3).update(sft_rows(), seed=seed)["loss"] for seed in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]
    assert learner().update(sft_rows(), seed=5) == learner().update(sft_rows(), seed=6)
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


@pytest.mark.parametrize(("weight", "budget"), [(0.0, 10_000), (0.3, 1), (0.3, 30)])
def test_loss_and_gradient_are_those_of_a_naive_loop_with_context_weighed(weight: float, budget: int) -> None:
    """The loss told is that of assistant tokens alone."""
    mine = learner(context_loss_weight=weight, tokens_per_microbatch=budget, max_grad_norm=1e9)
    model, rows = examples.model(), sft_rows(3)
    values = torch.stack([-naive_values(model, row) for row in rows])  # [N, T - 1], nats
    mask = torch.tensor([row.loss_mask[1:] for row in rows])
    assert mine.update(rows, seed=0)["loss"] == pytest.approx(values[mask].mean().item(), rel=1e-5)
    weights = mask + weight * ~mask
    ((values * weights).sum() / weights.sum()).backward()
    assert_gradients(mine._policy, model)


def test_an_update_says_how_many_of_its_tokens_are_learnt_from() -> None:
    mine, rows, seen = learner(tokens_per_microbatch=1), sft_rows(), []
    mine._policy.model.base_model.register_forward_pre_hook(lambda *_: seen.append(mine._policy.learnt))
    total = sum(len(row.token_ids) for row in rows)
    for _ in range(2):
        seen.clear()
        mine.update(rows, seed=0)
        assert len(seen) > 1 and seen == sorted(set(seen)) and seen[0] == (0, total)
        assert mine._policy.learnt == (total, total)
