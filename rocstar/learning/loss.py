"""The clipped, token-level policy loss. Source: paper §2.2.1, eq. 6-7."""

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
    """Number of tokens whose ratio was clipped."""


def policy_loss(
    *,
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """- sum over tokens of min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    All [T]: tokens that the policy wrote, of any rows. Dividing by the number of such tokens in the whole step (not
    per row) is the paper's token-level mean: long rows weigh more. No dual clip (the release has one, the paper does
    not)."""
    log_ratio = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantages_T
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    return PolicyLoss(total=-torch.minimum(plain, bounded).sum(), clipped=(bounded < plain).sum())


def kl_to_reference(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of exp(d) - d - 1 with d = reference - policy: non-negative and unbiased.
    Source: Schulman, "Approximating KL divergence" (k3); off by default, as in the paper."""
    difference = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).sum()
