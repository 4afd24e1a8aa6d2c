"""Samples tokens: temperature, top-k, top-p, and one uniform number per token, which depends only on its identity."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

BLOCK = 32  # tokens summed at once

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
    logits_NV: torch.Tensor, temperatures: Floats, top_ps: Floats, top_ks: Ints, noise_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row; noise: from `uniforms`, on the device of the logits.

    Returns token ids [N] and their natural-log probability [N] after temperature and before truncation, which a learner
    can recompute. A row of temperature 0 takes the most likely token and reports its probability at temperature 1."""
    greedy = temperatures == 0
    if not np.isin(temperatures, (0, 1)).all():
        divisor = torch.from_numpy(np.where(greedy, 1.0, temperatures)).to(logits_NV.device, torch.float32)
        logits_NV = logits_NV.float() / divisor.unsqueeze(1)
    full = torch.softmax(logits_NV, dim=-1, dtype=torch.float32)
    weights_NV, cut = full, ~greedy & ((top_ps < 1) | (top_ks > 0))
    if cut.any():  # only the rows that use it: a row must not depend on its neighbours' settings
        rows = torch.from_numpy(np.flatnonzero(cut)).to(full.device)
        weights_NV = full.clone()
        weights_NV[rows] = _truncate(full[rows], top_ps[cut], top_ks[cut])
    tokens = _inverse(weights_NV, noise_N)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(full.device), full.argmax(-1), tokens)
    return tokens, full.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def _inverse(weights_NV: torch.Tensor, noise_N: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of a row first exceeds its share `noise` of the whole: [N].

    First the block of BLOCK tokens, then the token in it, since a running sum is slow where a plain sum is fast."""
    count, size = weights_NV.shape
    blocks = F.pad(weights_NV, (0, -size % BLOCK)).view(count, -1, BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = noise_N.unsqueeze(1) * ends[:, -1:]
    block = _first_above(ends, target)
    before = F.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(count, device=blocks.device), block.squeeze(1)].double().cumsum(-1)
    return (block * BLOCK + _first_above(inside, target - before)).squeeze(1)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[N, 1] the first place of each row that exceeds its target; if rounding leaves none, the last with weight."""
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def _truncate(full_NV: torch.Tensor, top_ps: Floats, top_ks: Ints) -> torch.Tensor:
    """The k likeliest tokens and of these the smallest set of mass p; the rest is zero."""
    ordered, order = full_NV.sort(dim=-1, descending=True)
    size = full_NV.shape[1]
    ranks = torch.arange(size, device=full_NV.device)
    ks = torch.from_numpy(np.where(top_ks > 0, top_ks, size)).to(full_NV.device).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= ks, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    mass_before = ordered.cumsum(-1) - ordered
    ps = torch.from_numpy(np.where(top_ps < 1, top_ps, np.inf)).to(ordered).unsqueeze(1)
    ordered = ordered.masked_fill((mass_before >= ps) & (ranks > 0), 0.0)
    return torch.empty_like(ordered).scatter_(1, order, ordered)
