"""Published policy losses over the same tokens (`protocols.PolicyLoss`), each as its paper defines it; importance
weights for tokens that older weights or another engine wrote; and the KL distance from a reference. A loss returns one
number per token; the learner takes the mean and adds the other terms.

r is a token's probability ratio, current over old; A its advantage. If a step has one update, every r is 1 and all
losses except `sapo` have the gradient of - A log p; they differ on tokens whose probability has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from rocstar.config.sections import LearningSection
from rocstar.errors import ConfigError
from rocstar.protocols import PolicyLoss, PolicyTokens
from rocstar.support.plugins import is_reference, named, own_code

MAX_LOG_RATIO = 10.0  # ratio <= 22,000: never reached on-policy; keeps one mismatched token from an infinite loss
DPPO_CAP = 20.0  # of the ratio in DPPO, which bounds the divergence instead (its section 5.4)
Losses = tuple[torch.Tensor, torch.Tensor]


def log_ratios(tokens: PolicyTokens) -> torch.Tensor:
    return (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(ratio: torch.Tensor, tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return -torch.minimum(plain, bounded), bounded < plain


def grpo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """Paper, eq. 6. dual_clip: where A < 0 no term falls below dual_clip * A, since `min` alone sets no bound; 0: off
    (Ye et al. 2020, arXiv 1912.09729; the release uses 3)."""
    losses, bounded = clipped(log_ratios(tokens).exp(), tokens, settings)
    if settings.dual_clip:
        most = torch.where(tokens.advantages < 0, -settings.dual_clip * tokens.advantages, torch.inf)
        losses, bounded = torch.minimum(losses, most), bounded | (losses > most)
    return losses, bounded


def cispo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- clip(r) A log p, no gradient through clip(r): every token keeps its gradient (MiniMax-M1, arXiv 2506.13585)."""
    ratio = log_ratios(tokens).detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, weight != ratio


def sapo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- sigmoid(t (r - 1)) 4 / t A: a soft gate around r = 1, steeper where A <= 0 (SAPO, arXiv 2511.20347)."""
    steepness = torch.where(tokens.advantages > 0, settings.gate_right, settings.gate_wrong)
    gate = torch.sigmoid(steepness * (log_ratios(tokens).exp() - 1)) * 4 / steepness
    return -gate * tokens.advantages, torch.zeros_like(gate, dtype=torch.bool)


def dppo_tv(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """No gradient where a token's probability has moved in A's direction by more than clip_high, or clip_low: bounds
    the probability, not the ratio, so rare tokens stay free (DPPO with total variation, arXiv 2602.04879)."""
    moved = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    free = torch.where(tokens.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low)
    weight = log_ratios(tokens).detach().exp().clamp(max=DPPO_CAP) * free
    return -weight * tokens.advantages * tokens.logprobs, ~free


# -- of whole attempts -------------------------------------------------------------------------------------------------


def mean_of_attempt(values_T: torch.Tensor, attempts_T: torch.Tensor) -> torch.Tensor:
    """[T] for each token the mean over the tokens of its attempt."""
    count = int(attempts_T.max()) + 1 if len(attempts_T) else 0
    sums, sizes = values_T.new_zeros(2, count)
    sums = sums.index_add(0, attempts_T, values_T)
    means: torch.Tensor = sums / sizes.index_add(0, attempts_T, torch.ones_like(values_T)).clamp(min=1)
    return means[attempts_T]


def gspo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """GRPO's loss with one ratio for all tokens of an attempt, their geometric mean (GSPO, arXiv 2507.18071), in its
    token form, whose gradient is the same. Needs clip_low and clip_high of about 1e-4 and loss_mean "attempts"."""
    whole = mean_of_attempt((tokens.logprobs - tokens.old_logprobs).detach(), tokens.attempts)
    ratio = (tokens.logprobs - tokens.logprobs.detach() + whole).clamp(max=MAX_LOG_RATIO).exp()
    return clipped(ratio, tokens, settings)


gspo.whole_attempts = True  # type: ignore[attr-defined]


LOSSES: Mapping[str, PolicyLoss] = {each.__name__: each for each in (grpo, cispo, dppo_tv, gspo, sapo)}
"""By their names in a recipe; tests/contracts/test_loss.py runs over them."""


def loss_of(
    settings: LearningSection, folders: Sequence[Path | str] = ()
) -> tuple[Callable[[PolicyTokens], Losses], bool]:
    """The function that `learning.loss` names, under its settings (the loss of each token, and whether a bound removed
    its gradient; both [T]), and whether it needs all tokens of an attempt at once.

    folders: where the user's modules are. Raises ConfigError if there is no such loss, or it can't be trained with
    under these settings: checked now on three tokens, and for a user's own loss also on those of each step."""
    found = named(settings.loss, LOSSES, setting="learning.loss", takes=("tokens", "settings"), folders=folders)
    setting, whole_attempts = f"learning.loss = {settings.loss!r}", bool(getattr(found, "whole_attempts", False))

    def checked(tokens: PolicyTokens) -> Losses:
        count = len(tokens.logprobs)
        with own_code(f"{setting} failed on {count} tokens", found):
            given = found(tokens, settings)
        several = given if isinstance(given, tuple | list) else (given,)
        if len(several) != 2 or not all(isinstance(one, torch.Tensor) for one in several):
            raise ConfigError(
                f"{setting} returned {', '.join(type(one).__name__ for one in several) or 'nothing'}; let it return "
                "two tensors: the loss of each token, and whether a bound removed its gradient "
                "(all False without a bound)"
            )
        losses, bounded = several
        if not (losses.shape == bounded.shape == (count,) and losses.requires_grad and bounded.dtype == torch.bool):
            raise ConfigError(
                f"{setting} gave losses of shape {tuple(losses.shape)}, "
                f"{'with' if losses.requires_grad else 'without'} a gradient, and bounds of shape "
                f"{tuple(bounded.shape)} and {bounded.dtype} for {count} tokens; give "
                "one of each for each token, the losses with a gradient, the bounds as torch.bool"
            )
        return losses, bounded

    logprobs, places = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.arange(3)
    others = {"advantages": 1.0 - places, "attempts": places}
    others |= {name: logprobs.detach().clone() for name in ("old_logprobs", "sampled_logprobs")}
    losses, _ = checked(PolicyTokens(logprobs=logprobs, **others))
    with own_code(f"{setting} has no gradient by logprobs", found):
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    if not (losses + gradient).isfinite().all():
        raise ConfigError(
            f"{setting} gave the losses {losses.tolist()} and the gradient {gradient.tolist()}; both have to be finite"
        )
    changed = [f"tokens.{name}" for name, values in others.items() if values._version]
    if changed:
        raise ConfigError(f"{setting} changed {' and '.join(changed)} in place; let it make new tensors instead")
    return (checked if is_reference(settings.loss) else lambda tokens: found(tokens, settings)), whole_attempts


# -- weights, masks and distances of tokens ----------------------------------------------------------------------------


def importance_weights(
    old_logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor, cap: float, floor: float = 0.0, masks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(exp(old - sampled), cap) for each token, without a gradient, and which of them are capped; both [T]. masks:
    the weight is 0 above the cap and below the floor.

    old: the learner's at the step's beginning; sampled: the engine's when it wrote the token, under whatever weights it
    had. Source: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025. With the ratio of `grpo` against the learner's own old logprobs it is the decoupled
    objective of AReaL (arXiv 2505.24298) with a capped weight. Masks: IcePop (Ling team, arXiv 2510.18855) with a
    floor, masked importance sampling without one."""
    ratio = (old_logprobs_T - sampled_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio > cap) | (ratio < floor)
    return (ratio * ~outside if masks else ratio.clamp(max=cap)), outside


def counts_by_attempt(tokens: PolicyTokens, settings: LearningSection) -> torch.Tensor:
    """[T] whether the attempt of a token counts; masked tokens still count in the mean's denominator.

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
