"""Our policy losses and advantages beside verl's own code: the same loss and gradient on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: scripts/adapters_env")

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import ADVANTAGES
from rocstar.learning.methods import LOSSES
from tests.adapters.tokens import drawn, ours

OURS = {"grpo": "vanilla", "gmpo": "geo_mean"}
"""Names that differ."""
BY_ATTEMPT = {"gspo", "sapo", "gmpo"}
"""Where verl takes the mean over attempts, by itself or by its advice."""
AS_THEY_ARE: Mapping[str, tuple[float, float]] = {"gspo": (3e-2, 4e-2)}
"""clip_low and clip_high, where others than ours make sense."""


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
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
    total, found = ours(settings, "attempts" if name in BY_ATTEMPT else "tokens", rows)
    assert total == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_are_those_of_verl(name: str) -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.25, 0.5, 1.0, 0.0]]
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.double)
    index = np.repeat(np.arange(len(groups)), 4)
    estimator: Any = core_algos.get_adv_estimator_fn(name)
    theirs, _ = estimator(rewards[:, None], torch.ones(len(rewards), 1), index=index, config=None)
    own = [value for group in groups for value in ADVANTAGES[name](group, LearningSection())]
    assert own == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)


def actor(low: float, high: float, cap: float) -> Any:
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1,
        clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=cap, tau_pos=1.0, tau_neg=1.05,
    )  # fmt: skip
