"""The clipped, token-level policy loss (paper §2.2.1, eq. 6-7), and the weights that correct it for tokens which other
weights, or another engine, have written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 10.0  # ratio <= 22,000: never reached on-policy; keeps one mismatched token from an infinite loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Sums over some policy tokens; divide by the step's token count."""

    total: torch.Tensor
    """Scalar to back-propagate after division."""
    clipped: torch.Tensor
    """Number of tokens whose ratio was clipped, so that they have no gradient."""


def policy_loss(
    *,
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    weights_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """- sum over tokens of w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); w is `weights_T` or 1.

    All [T]: tokens that the policy wrote, of any rows. dual_clip: where A < 0 no term falls below dual_clip * A, which
    `min` alone leaves unbounded; 0 for no such bound. Source: Ye et al. 2020 (arXiv 1912.09729); the release has it at
    3, eq. 6 of the paper does not."""
    log_ratio = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantages_T
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    lower, clipped = torch.minimum(plain, bounded), bounded < plain
    if dual_clip:
        floor = torch.where(advantages_T < 0, dual_clip * advantages_T, -torch.inf)
        lower, clipped = torch.maximum(lower, floor), clipped | (lower < floor)
    weighed = lower if weights_T is None else weights_T * lower
    return PolicyLoss(total=-weighed.sum(), clipped=clipped.sum())


def importance_weights(
    old_logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(exp(old - sampled), cap) for each token, without a gradient, and which of them are capped; both [T].

    old: the learner's at the step's beginning; sampled: those of the engine when it wrote the token, whatever its
    weights were. Source: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025. With the ratio of `policy_loss` against the learner's own old logprobs it is the
    decoupled objective of AReaL (arXiv 2505.24298), its weight capped."""
    ratio = (old_logprobs_T - sampled_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp(max=cap), ratio > cap


def kl_to_reference(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """[T] exp(d) - d - 1 of each token with d = reference - policy: non-negative and unbiased.
    Source: Schulman, "Approximating KL divergence" (k3); off by default, as in the paper."""
    difference = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
