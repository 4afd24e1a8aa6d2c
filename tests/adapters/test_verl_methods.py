"""Our policy losses and advantages beside verl's own code: the same loss and gradient on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: scripts/adapters_env")

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import ADVANTAGES
from rocstar.learning.methods import LOSSES, counts_by_attempt, importance_weights
from tests.adapters.tokens import compare, drawn, ours, tokens_of

OURS = {"grpo": "vanilla"}
"""Names that differ."""
BY_ATTEMPT = {"gspo", "sapo"}
"""Where verl takes the mean over attempts, by itself or by its advice."""
AS_THEY_ARE: Mapping[str, tuple[float, float]] = {"gspo": (3e-2, 4e-2)}
"""clip_low and clip_high, where others than ours make sense."""


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_verl(name: str, spread: float) -> None:
    low, high = AS_THEY_ARE.get(name, (0.2, 0.28))
    new, old, advantages, mask = rows = drawn(3, spread)
    mean = "seq-mean-token-mean" if name in BY_ATTEMPT else "token-mean"
    theirs, logprobs = core_algos.get_policy_loss_fn(OURS.get(name, name)), new.clone().requires_grad_()
    config = actor(low, high, 3.0 if name == "grpo" else 20.0)
    loss, _ = theirs(old, logprobs, advantages, mask, loss_agg_mode=mean, config=config)
    (expected,) = torch.autograd.grad(loss, logprobs)

    settings = LearningSection(loss=name, clip_low=low, clip_high=high, dual_clip=3.0)
    found = ours(settings, "attempts" if name in BY_ATTEMPT else "tokens", rows)
    compare(name, f"verl {OURS.get(name, name)}", found, (loss.item(), expected))


@pytest.mark.parametrize(("cap", "floor"), [(1.5, None), (1.5, 0.6)])
def test_importance_weights_are_those_of_verl(cap: float, floor: float | None) -> None:
    old, sampled, _, mask = rows = drawn(4, 0.5)
    kept, bounds = mask.bool(), cap if floor is None else f"{floor}_{cap}"
    theirs, _ = compute_rollout_correction_weights(old - sampled, mask, "token", bounds)
    own, _ = importance_weights(old[kept], sampled[kept], cap, floor or 0.0, masks=floor is not None)
    name = "importance_cap" if floor is None else "importance_floor"
    compare(name, "verl rollout_is token", (own.sum().item(), own), (theirs.sum().item(), theirs[kept]))
    assert 0.05 < (own == (cap if floor is None else 0.0)).double().mean() < 0.6 and len(rows) == 4


def test_attempts_within_bounds_of_their_mean_ratio_are_those_of_verl() -> None:
    """verl's bounds are of sampled / old (rollout_corr_helper.py:264), ours of old / sampled as all others of both."""
    old, sampled, advantages, mask = drawn(4, 0.5)
    theirs, _ = compute_rollout_rejection_mask(old - sampled, mask, "seq_mean_k1", f"{1 / 1.05}_{1 / 0.9}")
    tokens = tokens_of((old, old, advantages, mask), old, sampled)
    own = counts_by_attempt(tokens, LearningSection(attempt_ratio_cap=1.05, attempt_ratio_floor=0.9)).double()
    compare("attempt_ratio_cap, _floor", "verl rollout_rs seq_mean_k1", (0.0, own), (0.0, theirs[mask.bool()]))
    assert 0 < own.mean() < 1


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_are_those_of_verl(name: str) -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.25, 0.5, 1.0, 0.0]]
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.double)
    index = np.repeat(np.arange(len(groups)), 4)
    estimator: Any = core_algos.get_adv_estimator_fn(name)
    theirs, _ = estimator(rewards[:, None], torch.ones(len(rewards), 1), index=index, config=None)
    own = [value for group in groups for value in ADVANTAGES[name](group, LearningSection())]
    compare(f"advantage {name}", f"verl {name}", (0.0, torch.tensor(own, dtype=torch.double)), (0.0, theirs[:, 0]))


def actor(low: float, high: float, cap: float) -> Any:
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1,
        clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=cap, tau_pos=1.0, tau_neg=1.05,
    )  # fmt: skip
