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
from tests.adapters.tokens import LENGTHS, compare, drawn, ours

LOW, HIGH = 0.2, 0.28
SAME = [
    # ours, TRL's loss_type and level, the mean that it takes
    ("grpo", "grpo", "token", "attempts"),
    ("grpo", "bnpo", "token", "tokens"),
    ("grpo", "dapo", "token", "tokens"),
    ("sapo", "sapo", "token", "attempts"),
    ("gspo", "grpo", "sequence", "attempts"),
]


def trainer(kind: str, level: str, limit: float, logprobs: torch.Tensor) -> Any:
    """What `_compute_loss` asks of a trainer."""
    own = SimpleNamespace(
        args=SimpleNamespace(
            delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        model=SimpleNamespace(training=True), loss_type=kind, importance_sampling_level=level, beta=0.0,
        top_entropy_quantile=1.0, off_policy_mask_threshold=limit or None, aux_loss_enabled=False, use_vllm=False,
        epsilon_low=LOW, epsilon_high=HIGH, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)}, max_completion_length=max(LENGTHS),
        _get_per_token_logps_and_entropies=lambda *given, **more: (logprobs, torch.zeros_like(logprobs), None),
    )  # fmt: skip
    own.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    return own


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("limit", [0.0, 0.05])
@pytest.mark.parametrize(("name", "kind", "level", "mean"), SAME)
def test_loss_and_gradient_are_those_of_trl(
    name: str, kind: str, level: str, mean: str, limit: float, spread: float
) -> None:
    new, old, advantages, mask = rows = drawn(5, spread)
    sampled = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(6), dtype=torch.double)
    logprobs, ids = new.clone().requires_grad_(), torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages[:, 0], "old_per_token_logps": old, "num_items_in_batch": mask.sum(),
        "sampling_per_token_logps": sampled,
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer(kind, level, limit, logprobs), None, inputs)
    (expected,) = torch.autograd.grad(loss, logprobs)

    settings = LearningSection(loss=name, clip_low=LOW, clip_high=HIGH, dual_clip=0.0, off_policy_kl=limit)
    method, reference = f"{name}{', off_policy_kl' * bool(limit)}, {mean}", f"TRL {kind}, {level}"
    compare(method, reference, ours(settings, mean, rows, sampled), (loss.item(), expected))
