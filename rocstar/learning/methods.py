"""Policy losses of the field, each as its paper has it, over the same tokens (`protocols.PolicyLoss`), and advantages
of turns and tokens; those of attempts are in `advantages.py`.

r is a token's probability ratio, current over old; A its advantage. In the step's only update every r is 1 and all of
them but `sapo` and `clip_cov` have the gradient of `gpg`; they differ in what they do to tokens that have moved."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress, groupby
from statistics import fmean

import torch
from torch.nn.utils.rnn import pad_sequence

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import advantages, place_of
from rocstar.protocols import PolicyLoss, PolicyTokens
from rocstar.types import Batch, BatchRow, seed_for

MAX_LOG_RATIO = 10.0  # ratio <= 22,000: never reached on-policy; keeps one mismatched token from an infinite loss
DPPO_CAP = 20.0  # of the ratio in DPPO, whose bound is one of divergence (its section 5.4)
Losses = tuple[torch.Tensor, torch.Tensor]


def log_ratios(tokens: PolicyTokens) -> torch.Tensor:
    return (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(ratio: torch.Tensor, tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return -torch.minimum(plain, bounded), bounded < plain


def grpo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """Paper, eq. 6. dual_clip: where A < 0 no term falls below dual_clip * A, which `min` alone leaves unbounded; 0
    for no such bound (Ye et al. 2020, arXiv 1912.09729; the release has it at 3)."""
    losses, bounded = clipped(log_ratios(tokens).exp(), tokens, settings)
    if settings.dual_clip:
        most = torch.where(tokens.advantages < 0, -settings.dual_clip * tokens.advantages, torch.inf)
        losses, bounded = torch.minimum(losses, most), bounded | (losses > most)
    return losses, bounded


def gpg(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- A log p: REINFORCE, without ratio and bound (GPG, arXiv 2504.02546)."""
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool)


def cispo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- clip(r) A log p, the clipped ratio without gradient: no token loses its own (MiniMax-M1, arXiv 2506.13585)."""
    ratio = log_ratios(tokens).detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, weight != ratio


def sapo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- sigmoid(t (r - 1)) 4 / t A: a soft gate around r = 1, steeper where A <= 0 (SAPO, arXiv 2511.20347)."""
    steepness = torch.where(tokens.advantages > 0, settings.gate_right, settings.gate_wrong)
    gate = torch.sigmoid(steepness * (log_ratios(tokens).exp() - 1)) * 4 / steepness
    return -gate * tokens.advantages, torch.zeros_like(gate, dtype=torch.bool)


def dppo_tv(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """No gradient where a token's probability has moved the way of A by more than clip_high, or clip_low: in
    probability, not in ratio, so that rare tokens stay free (DPPO with total variation, arXiv 2602.04879)."""
    moved = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    return _within(tokens, torch.where(tokens.advantages > 0, moved <= settings.clip_high, moved >= -settings.clip_low))


def dppo_kl(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """The same, by the KL divergence of "this token or another"."""
    new, old = tokens.logprobs.detach().exp(), tokens.old_logprobs.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    divergence = old * (tokens.old_logprobs - tokens.logprobs.detach()) + (1 - old) * others
    rises, falls = (divergence <= settings.clip_high) | (new <= old), (divergence <= settings.clip_low) | (new >= old)
    return _within(tokens, torch.where(tokens.advantages > 0, rises, falls))


def _within(tokens: PolicyTokens, free: torch.Tensor) -> Losses:
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
    """GRPO's with one ratio for all tokens of an attempt, the geometric mean of theirs (GSPO, arXiv 2507.18071): its
    form by token, whose gradient is the same. Wants clip_low and clip_high of some 1e-4 and loss_mean "attempts"."""
    whole = mean_of_attempt((tokens.logprobs - tokens.old_logprobs).detach(), tokens.attempts)
    ratio = (tokens.logprobs - tokens.logprobs.detach() + whole).clamp(max=MAX_LOG_RATIO).exp()
    return clipped(ratio, tokens, settings)


def gmpo(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- A times the geometric mean of an attempt's ratios, each clipped in its logarithm at -clip_low and clip_high
    (GMPO, arXiv 2507.20673). Wants loss_mean "attempts"."""
    way, plain = tokens.advantages.sign(), tokens.logprobs - tokens.old_logprobs
    kept = torch.minimum(way * plain, way * plain.clamp(-settings.clip_low, settings.clip_high))
    ratio = mean_of_attempt(way * kept, tokens.attempts).clamp(max=MAX_LOG_RATIO).exp()
    return -ratio * tokens.advantages, kept < way * plain


gspo.whole_attempts = gmpo.whole_attempts = True  # type: ignore[attr-defined]


# -- of tokens chosen among those of the whole update (arXiv 2505.22617) -----------------------------------------------


def covariances(rows: Sequence[BatchRow]) -> torch.Tensor:
    """[K] of each token of an update: (log p - its mean) (A - its mean). Ours: p is that at the step's beginning, so
    that the choice is the same however tokens are packed; verl's is the current one, equal in the first update."""
    own = [value for row in rows for value in compress(row.old_logprobs, row.loss_mask)]
    logprobs = torch.tensor(own, dtype=torch.double)
    others = [value for row in rows for value in compress(row.token_advantages, row.loss_mask)]
    advantages_K = torch.tensor(others, dtype=torch.double)
    return (logprobs - logprobs.mean()) * (advantages_K - advantages_K.mean())


def some_in_band(rows: Sequence[BatchRow], settings: LearningSection) -> list[int]:
    """Drawn uniformly among tokens whose covariance lies between the bounds; seeded by the first row, so that a step
    that is done again draws the same ones."""
    values = covariances(rows)
    band = ((values > settings.covariance_low) & (values < settings.covariance_high)).nonzero()[:, 0].tolist()
    rng = random.Random(seed_for("clip_cov", rows[0].identity, *rows[0].token_ids))
    return rng.sample(band, min(len(band), max(1, int(settings.covariance_share * len(values)))))


def highest(rows: Sequence[BatchRow], settings: LearningSection) -> list[int]:
    """The tokens of the highest covariance."""
    values = covariances(rows)
    places: list[int] = values.topk(max(1, int(settings.covariance_share * len(values)))).indices.tolist()
    return places


def clip_cov(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """GRPO's without dual_clip; chosen tokens have no gradient. Clipped besides, as in verl's code."""
    losses, bounded = clipped(log_ratios(tokens).exp(), tokens, settings)
    return losses.masked_fill(tokens.chosen, 0.0), bounded | tokens.chosen


def kl_cov(tokens: PolicyTokens, settings: LearningSection) -> Losses:
    """- r A, and for chosen tokens covariance_kl |log r| on top."""
    moved = log_ratios(tokens)
    losses = -moved.exp() * tokens.advantages + settings.covariance_kl * moved.abs() * tokens.chosen
    return losses, torch.zeros_like(tokens.chosen)


Choice = Callable[[Sequence[BatchRow], LearningSection], list[int]]
"""An update's scored rows -> which of its tokens, counted through, `PolicyTokens.chosen` is true for."""
CHOICES: Mapping[str, Choice] = {"clip_cov": some_in_band, "kl_cov": highest}
LOSSES: Mapping[str, PolicyLoss] = {
    each.__name__: each for each in (grpo, cispo, clip_cov, dppo_kl, dppo_tv, gmpo, gpg, gspo, kl_cov, sapo)
}
"""By their names in a recipe; tests/contracts/test_loss.py runs over them."""


# -- advantages of turns and tokens ------------------------------------------------------------------------------------


def gtpo(rows: Sequence[BatchRow], settings: LearningSection) -> list[list[float]]:
    """A turn's return is the reward, times turn_discount for each turn that follows; its advantage that of `grpo` among
    the returns of all turns of the group (GTPO, arXiv 2511.14846, of the outcome alone: no rewards of single
    turns, no shaping)."""
    turns = [[sum(run) for mine, run in groupby(row.loss_mask) if mine] or [0] for row in rows]
    discounts = [[settings.turn_discount**later for later in reversed(range(len(some)))] for some in turns]
    returns = [row.advantage * each for row, some in zip(rows, discounts, strict=True) for each in some]
    found = iter(advantages(returns, settings.normalize_by_std))
    return [[value for count, value in zip(some, found, strict=False) for _ in range(count)] for some in turns]


def otb(rows: Sequence[BatchRow], settings: LearningSection) -> list[list[float]]:
    """Reward minus the optimal token baseline (arXiv 2602.07078): at the t-th token of an attempt the mean reward of
    all that have one, each weighed by its tokens' energies up to there; 0 where only one attempt is as long, as in
    verl."""
    paths = [torch.tensor([*compress(row.energies, row.loss_mask)], dtype=torch.double).cumsum(0) for row in rows]
    weights_TG, rewards_G = pad_sequence(paths), torch.tensor([row.advantage for row in rows], dtype=torch.double)
    baseline = (weights_TG * rewards_G).sum(1) / (weights_TG.sum(1) + 1e-8)
    baseline[sorted(map(len, paths))[-2] :] = 0
    return [(row.advantage - baseline[: len(path)]).tolist() for row, path in zip(rows, paths, strict=True)]


TokenAdvantages = Callable[[Sequence[BatchRow], LearningSection], list[list[float]]]
"""Rows of a group's kept attempts, whose `advantage` is still the reward -> advantages of the tokens of each that the
policy wrote."""
TOKEN_ADVANTAGES: Mapping[str, TokenAdvantages] = {"gtpo": gtpo, "otb": otb}


def by_token(batches: Sequence[Batch], settings: LearningSection) -> list[Batch]:
    """A step's batches, whose rows have rewards as advantages, with those of each token."""
    groups, found = defaultdict(list), {}
    for row in (row for batch in batches for row in batch.rows):
        groups[place_of(row)[0]].append(row)
    for rows in groups.values():
        rows.sort(key=place_of)
        for row, own in zip(rows, TOKEN_ADVANTAGES[settings.advantage](rows, settings), strict=True):
            values = iter(own)
            spread = [next(values) if mine else 0.0 for mine in row.loss_mask]
            found[row.identity] = replace(row, advantages=spread, advantage=fmean(own or [0.0]), energies=())
    return [replace(batch, rows=tuple(found[row.identity] for row in batch.rows)) for batch in batches]
