"""Drawing tokens: temperature, top-k, top-p, one uniform number per token that follows from identity alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Ints, counters: Ints) -> Floats:
    """One number in [0, 1) for each (seed, counter): [n], [n] -> [n]. Source: the SplitMix64 finaliser."""
    with np.errstate(over="ignore"):
        state = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(
    logits_NV: torch.Tensor, temperatures: Floats, top_ps: Floats, top_ks: Ints, noise: Floats
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Returns token ids [N] and their natural-log probability [N] under the distribution drawn from, that is after
    temperature and truncation. A row of temperature 0 takes the most likely token and reports its probability at
    temperature 1."""
    greedy = torch.from_numpy(temperatures == 0).to(logits_NV.device)
    divisor = torch.from_numpy(np.where(temperatures == 0, 1.0, temperatures)).to(logits_NV)
    logprobs = torch.log_softmax(logits_NV.float() / divisor.unsqueeze(1), dim=-1)
    cut = (temperatures > 0) & ((top_ps < 1) | (top_ks > 0))
    if cut.any():  # only the rows that ask for it: a row must not notice its neighbours' settings
        rows = torch.from_numpy(cut).to(logprobs.device).unsqueeze(1)
        logprobs = torch.where(rows, _truncate(logprobs, top_ps, top_ks), logprobs)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = torch.from_numpy(noise).to(cumulative.device).unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits_NV.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _truncate(logprobs_NV: torch.Tensor, top_ps: Floats, top_ks: Ints) -> torch.Tensor:
    """Keep the k likeliest tokens and the smallest set of mass p, then renormalise."""
    ordered, order = logprobs_NV.sort(dim=-1, descending=True)
    size = logprobs_NV.shape[1]
    ranks = torch.arange(size, device=logprobs_NV.device)
    ks = torch.from_numpy(np.where(top_ks > 0, top_ks, size)).to(logprobs_NV.device).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= ks, -torch.inf)
    ordered = torch.log_softmax(ordered, dim=-1)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    ps = torch.from_numpy(np.where(top_ps < 1, top_ps, np.inf)).to(ordered).unsqueeze(1)
    ordered = torch.log_softmax(ordered.masked_fill((mass_before >= ps) & (ranks > 0), -torch.inf), dim=-1)
    return torch.empty_like(ordered).scatter_(1, order, ordered)
