"""The policy loss worked out by hand, and the KL estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.learning.methods import MAX_LOG_RATIO, grpo, importance_weights, kl_to_reference
from rocstar.protocols import PolicyTokens


@dataclass
class Sums:
    """Over some tokens."""

    total: torch.Tensor
    clipped: torch.Tensor


def policy_loss(
    *,
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    weights_T: torch.Tensor | None = None,
    **settings: float,
) -> Sums:
    tokens = PolicyTokens(
        logprobs=logprobs_T,
        old_logprobs=old_logprobs_T,
        sampled_logprobs=old_logprobs_T,
        advantages=advantages_T,
        attempts=torch.zeros(len(logprobs_T), dtype=torch.long),
        chosen=torch.zeros(len(logprobs_T), dtype=torch.bool),
    )
    losses, clipped = grpo(tokens, LearningSection.model_validate({"dual_clip": 0.0, **settings}))
    return Sums(total=(losses if weights_T is None else weights_T * losses).sum(), clipped=clipped.sum())


def loss_of(ratios: list[float], advantage: float, dual_clip: float = 0.0) -> tuple[Sums, torch.Tensor]:
    """Loss of one row whose old logprobs are -1 each, and the gradient with respect to its logprobs."""
    old = torch.full((len(ratios),), -1.0)
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    loss = policy_loss(
        logprobs_T=new,
        old_logprobs_T=old,
        advantages_T=torch.full_like(old, advantage),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    loss.total.backward()
    return loss, new.grad


def test_three_tokens_of_a_right_attempt() -> None:
    # Ratios 1.1, 1.5 (clipped to 1.28), 0.5 (below the lower bound, but lower is already worse: not clipped), A = 2.
    # Loss -(2.2 + 2.56 + 1.0) = -5.76; d/dlogprob = -ratio * A where not clipped.
    loss, gradient = loss_of([1.1, 1.5, 0.5], 2.0)
    assert loss.total.item() == pytest.approx(-5.76, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-2.2, 0.0, -1.0], rel=1e-6)
    assert float(loss.clipped) == 1


def test_three_tokens_of_a_wrong_attempt() -> None:
    # A = -1: 0.9 as it is, 0.5 clipped to 0.8, 2.0 not clipped. Loss 0.9 + 0.8 + 2.0 = 3.7.
    loss, gradient = loss_of([0.9, 0.5, 2.0], -1.0)
    assert loss.total.item() == pytest.approx(3.7, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.9, 0.0, 2.0], rel=1e-6)
    assert float(loss.clipped) == 1


def test_a_second_clip_bounds_what_a_wrong_attempt_can_weigh() -> None:
    # A = -2, bound 3: 0.5 clipped to 0.8 as before, 2.9 as it is, 5 bounded to 3 and without a gradient.
    # Loss 1.6 + 5.8 + 6 = 13.4; without the bound 1.6 + 5.8 + 10 = 17.4.
    loss, gradient = loss_of([0.5, 2.9, 5.0], -2.0, dual_clip=3.0)
    assert loss.total.item() == pytest.approx(13.4, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.0, 5.8, 0.0], rel=1e-6)
    assert float(loss.clipped) == 2
    plain, gradient = loss_of([0.5, 2.9, 5.0], -2.0)
    assert plain.total.item() == pytest.approx(17.4, rel=1e-6)
    assert gradient.tolist() == pytest.approx([0.0, 5.8, 10.0], rel=1e-6)


def test_a_second_clip_leaves_right_attempts_alone() -> None:
    for dual_clip in (0.0, 3.0):
        loss, gradient = loss_of([0.1, 1.2, 5.0], 2.0, dual_clip)
        assert loss.total.item() == pytest.approx(-(0.2 + 2.4 + 2.56), rel=1e-6)
        assert gradient.tolist() == pytest.approx([-0.2, -2.4, 0.0], rel=1e-6)


def test_one_hopelessly_mismatched_token_leaves_the_loss_finite() -> None:
    loss, gradient = loss_of([math.exp(30), 1.0], -1.0)
    assert loss.total.item() == pytest.approx(math.exp(MAX_LOG_RATIO) + 1, rel=1e-5)
    assert torch.isfinite(gradient).all()


def test_the_kl_estimate_is_never_negative_and_zero_for_equal_models() -> None:
    mine = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    other = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    each = kl_to_reference(mine, other)
    assert each.shape == mine.shape and (each >= 0).all() and each.max() > 1
    assert float(kl_to_reference(mine, mine).abs().sum()) == 0


def test_the_kl_estimate_is_right_on_average() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    expected = sum(float(p[i]) * float(kl_to_reference(p[i].log(), q[i].log())) for i in range(3))
    assert expected == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_importance_weights_are_the_quotient_of_learner_and_engine_up_to_the_cap() -> None:
    # Learner at half, exactly, twice and nine times the engine's probability; cap 2.
    old = torch.tensor([0.1, 0.2, 0.4, 0.9]).log().requires_grad_()
    sampled = torch.tensor([0.2, 0.2, 0.2, 0.1]).log()
    weights, capped = importance_weights(old, sampled, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0], rel=1e-6)
    assert not weights.requires_grad
    assert importance_weights(old, sampled, 3.0)[1].tolist() == [False, False, False, True]
    assert capped[3] and not capped[:2].any()


def test_three_tokens_weighed_by_importance() -> None:
    # The right attempt above: terms 2.2, 2.56 (clipped), 1.0, now weighed 0.5, 1 and 2: loss -(1.1 + 2.56 + 2) = -5.66,
    # and d/dlogprob = -w * ratio * A where not clipped, as if the weights were constants.
    old = torch.full((3,), -1.0)
    new = (old + torch.tensor([1.1, 1.5, 0.5]).log()).requires_grad_()
    weights, _ = importance_weights(old, old - torch.tensor([0.5, 1.0, 8.0]).log(), 2.0)
    loss = policy_loss(
        logprobs_T=new,
        old_logprobs_T=old,
        advantages_T=torch.full_like(old, 2.0),
        clip_low=0.2,
        clip_high=0.28,
        weights_T=weights,
    )
    loss.total.backward()
    assert loss.total.item() == pytest.approx(-5.66, rel=1e-6)
    assert new.grad.tolist() == pytest.approx([-1.1, 0.0, -2.0], rel=1e-6)
