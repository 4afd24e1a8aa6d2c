"""The policy loss worked out by hand, and the KL estimate."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch

from rocstar.config.sections import LearningSection
from rocstar.learning.methods import MAX_LOG_RATIO, grpo, importance_weights, kl_to_reference
from rocstar.protocols import PolicyTokens


def loss_of(ratios: list[float], advantage: float, dual_clip: float = 0.0) -> tuple[float, list[float], int]:
    """Of tokens whose old logprobs are -1: the summed loss, its gradient by their logprobs, how many are clipped."""
    old = torch.full((len(ratios),), -1.0)
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    none = torch.zeros(len(ratios), dtype=torch.long)
    tokens = PolicyTokens(
        logprobs=new,
        old_logprobs=old,
        sampled_logprobs=old,
        advantages=torch.full_like(old, advantage),
        attempts=none,
        chosen=none.bool(),
    )
    losses, clipped = grpo(tokens, LearningSection(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip))
    losses.sum().backward()
    assert new.grad is not None
    return losses.sum().item(), new.grad.tolist(), int(clipped.sum())


@pytest.mark.parametrize(
    ("ratios", "advantage", "dual_clip", "total", "gradient", "clipped"),
    [
        # 1.1, 1.5 (clipped to 1.28) and 0.5 (below the lower bound, but lower is already worse: not clipped):
        # -(2.2 + 2.56 + 1.0), and -ratio * A where not clipped.
        ([1.1, 1.5, 0.5], 2.0, 0.0, -5.76, [-2.2, 0.0, -1.0], 1),
        # 0.9 as it is, 0.5 clipped to 0.8, 2.0 not clipped: 0.9 + 0.8 + 2.0.
        ([0.9, 0.5, 2.0], -1.0, 0.0, 3.7, [0.9, 0.0, 2.0], 1),
        # The second clip, at 3: 0.5 clipped to 0.8, 2.9 as it is, 5 bounded to 3 and without a gradient.
        ([0.5, 2.9, 5.0], -2.0, 3.0, 1.6 + 5.8 + 6, [0.0, 5.8, 0.0], 2),
        ([0.5, 2.9, 5.0], -2.0, 0.0, 1.6 + 5.8 + 10, [0.0, 5.8, 10.0], 1),
        # It leaves right attempts alone.
        ([0.1, 1.2, 5.0], 2.0, 3.0, -(0.2 + 2.4 + 2.56), [-0.2, -2.4, 0.0], 1),
    ],
)
def test_three_tokens_by_hand(
    ratios: list[float], advantage: float, dual_clip: float, total: float, gradient: list[float], clipped: int
) -> None:
    found, slopes, bounded = loss_of(ratios, advantage, dual_clip)
    assert (found, slopes) == (pytest.approx(total, rel=1e-6), pytest.approx(gradient, rel=1e-6))
    assert bounded == clipped


def test_one_hopelessly_mismatched_token_leaves_the_loss_finite() -> None:
    loss, gradient, _ = loss_of([math.exp(30), 1.0], -1.0)
    assert loss == pytest.approx(math.exp(MAX_LOG_RATIO) + 1, rel=1e-5)
    assert all(map(math.isfinite, gradient))


def test_the_kl_estimate_is_never_negative_zero_for_equal_models_and_right_on_average() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    each = kl_to_reference(p.log(), q.log())
    assert each.shape == p.shape and (each >= 0).all() and each[1] == 0 < each[0]
    assert float((p * each).sum()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_importance_weights_are_the_quotient_of_learner_and_engine_between_cap_and_floor() -> None:
    """Learner at half, exactly, twice and nine times the engine's probability."""
    old = torch.tensor([0.1, 0.2, 0.4, 0.9]).log().requires_grad_()
    sampled = torch.tensor([0.2, 0.2, 0.2, 0.1]).log()
    weights, capped = importance_weights(old, sampled, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.0], rel=1e-6) and not weights.requires_grad
    assert capped[3] and not capped[:2].any()
    assert importance_weights(old, sampled, 3.0)[1].tolist() == [False, False, False, True]
    weights, outside = importance_weights(old, sampled, 5.0, 0.6, masks=True)  # IcePop's, at its bounds
    assert weights.tolist() == pytest.approx([0, 1, 2, 0]) and outside.tolist() == [True, False, False, True]
    assert importance_weights(old, sampled, 5.0, masks=True)[0].tolist() == pytest.approx([0.5, 1, 2, 0])
