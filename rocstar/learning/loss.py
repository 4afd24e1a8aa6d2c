"""Policy losses by name (`methods.py`), importance weights for tokens that older weights or another engine wrote, and
the KL distance from a reference.

A loss is of each token by itself (`protocols.PolicyLoss`); the learner takes the mean and adds the other terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rocstar.config.sections import LearningSection
from rocstar.errors import ConfigError
from rocstar.learning.methods import LOSSES, MAX_LOG_RATIO, Losses, mean_of_attempt
from rocstar.protocols import PolicyTokens
from rocstar.support.plugins import is_reference, named, own_code


def loss_of(
    settings: LearningSection, folders: Sequence[Path | str] = ()
) -> tuple[Callable[[PolicyTokens], Losses], bool]:
    """The function that `learning.loss` names, under its settings (the loss of each token, and whether a bound has
    taken its gradient; both [T]), and whether it wants all tokens of an attempt at once.

    folders: where the user's modules are. Raises ConfigError where there is no such loss, and where it cannot be
    learnt from: now on three tokens, later on those of a step."""
    takes = ("tokens", "settings")
    found = named(settings.loss, LOSSES, setting="learning.loss", takes=takes, folders=folders)
    said = f"learning.loss = {settings.loss!r}"

    def checked(tokens: PolicyTokens) -> Losses:
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

    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    same, advantages = logprobs.detach(), torch.tensor([1.0, -1.0, 0.0])
    losses, _ = checked(
        PolicyTokens(
            logprobs=logprobs,
            old_logprobs=same,
            sampled_logprobs=same,
            advantages=advantages,
            attempts=torch.arange(3),
            chosen=same > 0,
        )
    )
    with own_code(f"{said} has no gradient by logprobs", found):
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    if not gradient.isfinite().all():
        raise ConfigError(
            f"{said} gave the losses {losses.tolist()} and the gradient {gradient.tolist()} for three tokens; give "
            "finite numbers"
        )
    plain = checked if is_reference(settings.loss) else lambda tokens: found(tokens, settings)
    return plain, bool(getattr(found, "whole_attempts", False))


def _both(given: object, said: str) -> Losses:
    """What a loss of the user's own returned. Raises ConfigError."""
    several = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(several) == 2 and all(isinstance(one, torch.Tensor) for one in several):
        return several
    raise ConfigError(
        f"{said} returned {', '.join(type(one).__name__ for one in several) or 'nothing'}; let it return two tensors: "
        "the loss of each token, and for each token whether a bound has taken its gradient (all False without a bound)"
    )


def importance_weights(
    old_logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor, cap: float, floor: float = 0.0, masks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(exp(old - sampled), cap) for each token, without a gradient, and which of them are capped; both [T]. masks: 0
    instead, above the cap and below the floor.

    old: the learner's at the step's beginning; sampled: those of the engine when it wrote the token, whatever its
    weights were. Source: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025. With the ratio of `grpo` against the learner's own old logprobs it is the
    decoupled objective of AReaL (arXiv 2505.24298), its weight capped. Masks: IcePop (Ling team, arXiv 2510.18855) with
    a floor, masked importance sampling without one."""
    ratio = (old_logprobs_T - sampled_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio > cap) | (ratio < floor)
    return (ratio * ~outside if masks else ratio.clamp(max=cap)), outside


def counts_by_attempt(tokens: PolicyTokens, settings: LearningSection) -> torch.Tensor:
    """[T] whether the attempt of a token counts; those that do not keep their place in the mean.

    Two masks: the geometric mean of old / sampled lies within attempt_ratio_floor and _cap ("When Speed Kills
    Stability", Liu, Li et al. 2025); and the advantage is not negative, or the mean of log(sampled / current) is
    at most off_policy_kl (DeepSeek-V3.2, arXiv 2512.02556)."""
    written, now = tokens.sampled_logprobs, tokens.logprobs.detach()
    ratio = mean_of_attempt(tokens.old_logprobs - written, tokens.attempts).exp()
    inside = (ratio >= settings.attempt_ratio_floor) & (ratio <= (settings.attempt_ratio_cap or torch.inf))
    near = mean_of_attempt(written - now, tokens.attempts) <= (settings.off_policy_kl or torch.inf)
    return inside & (near | (tokens.advantages >= 0))


def kl_to_reference(logprobs_T: torch.Tensor, reference_T: torch.Tensor) -> torch.Tensor:
    """[T] exp(d) - d - 1 of each token with d = reference - policy: non-negative and unbiased.
    Source: Schulman, "Approximating KL divergence" (k3); off by default, as in the paper."""
    difference = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1
