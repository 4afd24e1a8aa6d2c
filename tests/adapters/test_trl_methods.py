"""Our policy losses beside TRL's own code: `GRPOTrainer._compute_loss` over the same log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: scripts/adapters_env")

import torch
from trl import GRPOTrainer

from rocstar.config.sections import LearningSection
from tests.adapters.tokens import LENGTHS, drawn, ours

LOW, HIGH = 0.2, 0.28
SAME = [
    # ours, TRL's loss_type and level, the mean that it takes
    ("grpo", "grpo", "token", "attempts"),
    ("grpo", "bnpo", "token", "tokens"),
    ("grpo", "dapo", "token", "tokens"),
    ("sapo", "sapo", "token", "attempts"),
    ("gspo", "grpo", "sequence", "attempts"),
]


def trainer(kind: str, level: str, logprobs: torch.Tensor) -> Any:
    """What `_compute_loss` asks of a trainer."""
    own = SimpleNamespace(
        args=SimpleNamespace(
            delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        model=SimpleNamespace(training=True), loss_type=kind, importance_sampling_level=level, beta=0.0,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
        epsilon_low=LOW, epsilon_high=HIGH, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)}, max_completion_length=max(LENGTHS),
        _get_per_token_logps_and_entropies=lambda *given, **more: (logprobs, torch.zeros_like(logprobs), None),
    )  # fmt: skip
    return own


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("name", "kind", "level", "mean"), SAME)
def test_loss_and_gradient_are_those_of_trl(name: str, kind: str, level: str, mean: str, spread: float) -> None:
    new, old, advantages, mask = rows = drawn(5, spread)
    logprobs, ids = new.clone().requires_grad_(), torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages[:, 0], "old_per_token_logps": old, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer(kind, level, logprobs), None, inputs)
    (expected,) = torch.autograd.grad(loss, logprobs)

    settings = LearningSection(loss=name, clip_low=LOW, clip_high=HIGH, dual_clip=0.0)
    total, found = ours(settings, mean, rows)
    assert total == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
