"""The clipped, token-level policy loss. Source: paper §2.2.1, eq. 6-7."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 10.0  # ratio <= 22,000: never reached on-policy; keeps one mismatched token from an infinite loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Sums over one micro-batch; divide by the step's token count."""

    total: torch.Tensor
    """Scalar to back-propagate after division; includes KL and entropy terms where their coefficients are not 0."""
    clipped: torch.Tensor
    """Number of policy tokens whose ratio was clipped."""


def policy_loss(
    *,
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    advantages_N: torch.Tensor,
    mask_NT: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """- sum over tokens of min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    All [N, T] tensors line up; mask is 1 on tokens the policy wrote. Dividing by the number of such tokens in the
    whole step (not per row) is the paper's token-level mean: long rows weigh more. No dual clip (the release has
    one, the paper does not)."""
    log_ratio = (logprobs_NT - old_logprobs_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = advantages_N.unsqueeze(1)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    total = -(torch.minimum(plain, bounded) * mask_NT).sum()
    clipped = ((bounded < plain) * mask_NT).sum()
    return PolicyLoss(total=total, clipped=clipped)


def kl_to_reference(logprobs_NT: torch.Tensor, reference_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of exp(d) - d - 1 with d = reference - policy: non-negative and unbiased.
    Source: Schulman, "Approximating KL divergence" (k3); off by default, as in the paper."""
    difference = (reference_NT - logprobs_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask_NT).sum()
