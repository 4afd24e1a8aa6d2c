"""Policy losses (paper §2.2.1, eq. 6-7), importance weights for tokens that older weights or another engine wrote, and
the KL distance from a reference.

A loss is of each token by itself (`protocols.PolicyLoss`); the learner takes the mean and adds the other terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rocstar.config.sections import LearningSection
from rocstar.errors import ConfigError
from rocstar.protocols import PolicyLoss, PolicyTokens
from rocstar.support.plugins import is_reference, named, own_code

MAX_LOG_RATIO = 10.0  # ratio <= 22,000: never reached on-policy; keeps one mismatched token from an infinite loss
TokenLosses = Callable[[PolicyTokens], tuple[torch.Tensor, torch.Tensor]]
"""Tokens -> the loss of each, and whether a bound has taken its gradient; both [T]."""


def grpo(tokens: PolicyTokens, settings: LearningSection) -> tuple[torch.Tensor, torch.Tensor]:
    """- min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) of each token, and which of them are clipped.

    dual_clip: where A < 0 no term falls below dual_clip * A, which `min` alone leaves unbounded; 0 for no such bound.
    Source: Ye et al. 2020 (arXiv 1912.09729); the release has it at 3, eq. 6 of the paper does not."""
    advantages_T = tokens.advantages
    ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * advantages_T
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_T
    lower, clipped = torch.minimum(plain, bounded), bounded < plain
    if settings.dual_clip:
        floor = torch.where(advantages_T < 0, settings.dual_clip * advantages_T, -torch.inf)
        lower, clipped = torch.maximum(lower, floor), clipped | (lower < floor)
    return -lower, clipped


LOSSES: Mapping[str, PolicyLoss] = {"grpo": grpo}
"""By their names in a recipe; tests/contracts/test_loss.py runs over them."""


def loss_of(settings: LearningSection, folders: Sequence[Path | str] = ()) -> TokenLosses:
    """The function that `learning.loss` names, under these settings. folders: where the user's modules are.

    Raises ConfigError where there is none, and where it cannot be learnt from: now on three tokens, later on those of
    a step."""
    takes = ("tokens", "settings")
    found = named(settings.loss, LOSSES, setting="learning.loss", takes=takes, folders=folders)
    said = f"learning.loss = {settings.loss!r}"
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    same, advantages = logprobs.detach(), torch.tensor([1.0, -1.0, 0.0])
    tokens = PolicyTokens(logprobs=logprobs, old_logprobs=same, sampled_logprobs=same, advantages=advantages)
    with own_code(f"{said} failed on three tokens", found):
        losses, bounded = _both(found(tokens, settings), said)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    if not (losses.shape == bounded.shape == (3,) and gradient.isfinite().all()):
        raise ConfigError(
            f"{said} gave losses {losses.tolist()}, bounds {bounded.tolist()} and the gradient {gradient.tolist()} for "
            "three tokens; give three finite numbers each"
        )

    def checked(tokens: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(tokens.logprobs)
        with own_code(f"{said} failed on {count} tokens", found):
            losses, bounded = _both(found(tokens, settings), said)
            fits = losses.shape == bounded.shape == (count,) and losses.requires_grad
        if not fits:
            raise ConfigError(
                f"{said} gave losses of shape {tuple(losses.shape)}, {'with' if losses.requires_grad else 'without'} a "
                f"gradient, and bounds of shape {tuple(bounded.shape)} for {count} tokens; give one of each for each "
                "token, the losses with a gradient"
            )
        return losses, bounded

    return checked if is_reference(settings.loss) else lambda tokens: found(tokens, settings)


def _both(given: object, said: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss of the user's own returned. Raises ConfigError."""
    several = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(several) == 2 and all(isinstance(one, torch.Tensor) for one in several):
        return several
    raise ConfigError(
        f"{said} returned {', '.join(type(one).__name__ for one in several) or 'nothing'}; let it return two tensors: "
        "the loss of each token, and for each token whether a bound has taken its gradient (all False without a bound)"
    )


def importance_weights(
    old_logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(exp(old - sampled), cap) for each token, without a gradient, and which of them are capped; both [T].

    old: the learner's at the step's beginning; sampled: those of the engine when it wrote the token, whatever its
    weights were. Source: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025. With the ratio of `grpo` against the learner's own old logprobs it is the
    decoupled objective of AReaL (arXiv 2505.24298), its weight capped."""
    ratio = (old_logprobs_T - sampled_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp(max=cap), ratio > cap


def kl_to_reference(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """[T] exp(d) - d - 1 of each token with d = reference - policy: non-negative and unbiased.
    Source: Schulman, "Approximating KL divergence" (k3); off by default, as in the paper."""
    difference = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
