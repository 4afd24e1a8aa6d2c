"""Rows to packed tensors: dealt to ranks by token count, cut into micro-batches under a token budget, no padding.

    rows    A A A A | B B | C C C       budget 6 tokens, shortest first
    packed  [B B C C C]  [A A A A]

The tokens that carry loss are listed beside the sequence. Token t of a row is predicted at t - 1, so

    row     P0 P1 A0 A1 R0 A2           P prompt, A written by the policy, R tool reply
    weight   0  0  1  1  0  1
    places      P1 A0    R0             where hidden states are read, K of them
    targets     A0 A1    A2             what they predict

Sorting happens only inside one optimizer step, so no step sees one kind of behaviour only. Row order inside a step
does not change its gradient except for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from rocstar.learning.attention import Block, blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows, end to end: T tokens, K of which carry loss."""

    indices: tuple[int, ...]
    """Which rows these are, shortest first; empty for a rank that has nothing left while others do."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    """Restart at 0 with each row."""
    blocks: tuple[Block, ...]
    """What attention computes together."""
    places_K: torch.Tensor
    """Position in the sequence of the token before each loss token, rows in order."""
    targets_K: torch.Tensor
    counts: tuple[int, ...]
    """Loss tokens of each row; their sum is K."""

    def per_token(self, values: Sequence[float]) -> torch.Tensor:
        """One number per row -> [K]."""
        counts = torch.tensor(self.counts, dtype=torch.long)
        return torch.tensor(values, dtype=torch.float).repeat_interleave(counts).to(self.ids_T.device)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, longest first to whoever has the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = tokens.index(min(tokens))
        hands[least].append(index)
        tokens[least] += lengths[index]
    return hands


def plan(lengths: Sequence[int], indices: Sequence[int], tokens_per_microbatch: int) -> list[tuple[int, ...]]:
    """`indices` cut into micro-batches, each exactly once; a row longer than the budget gets its own."""
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(indices, key=lambda i: (lengths[i], i)):
        if not batches or tokens + lengths[index] > tokens_per_microbatch:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += lengths[index]
    return [tuple(batch) for batch in batches]


def pack(
    ids: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]],
    tokens_per_microbatch: int,
    device: torch.device,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches, as many as every other rank has; `counted` ([T] a row) says which tokens carry loss.

    The first token of a row is predicted by nothing and never counts."""
    lengths = [len(row) for row in ids]
    plans = [plan(lengths, hand, tokens_per_microbatch) for hand in deal(lengths, ranks)]
    most = max(len(each) for each in plans)
    mine = plans[rank] + [()] * (most - len(plans[rank]))
    return [_micro(ids, counted, indices, device) for indices in mine]


def _micro(
    ids: Sequence[Sequence[int]], counted: Sequence[Sequence[bool]], indices: tuple[int, ...], device: torch.device
) -> MicroBatch:
    tokens = [ids[i] for i in indices] or [(0,)]  # an idle rank still takes part in the passes of the others
    lengths = tuple(len(row) for row in tokens)
    ids_T = torch.tensor(list(chain.from_iterable(tokens)))
    counts: list[int] = []
    places: list[int] = []
    begin = 0
    for index in indices:
        found = [t for t, counts_here in enumerate(counted[index]) if counts_here and t]
        counts.append(len(found))
        places.extend(begin + t - 1 for t in found)
        begin += len(ids[index])
    places_K = torch.tensor(places, dtype=torch.long)
    return MicroBatch(
        indices=indices,
        lengths=lengths,
        ids_T=ids_T.to(device),
        positions_T=torch.cat([torch.arange(n) for n in lengths]).to(device),
        blocks=blocks_of(lengths, device),
        places_K=places_K.to(device),
        targets_K=ids_T[places_K + 1].to(device),
        counts=tuple(counts),
    )


def pick(values: Sequence[Sequence[float]], counted: Sequence[Sequence[bool]], micro: MicroBatch) -> torch.Tensor:
    """Per-token numbers of all rows ([T] each) -> [K] of this micro-batch."""
    numbers = [values[i][t] for i in micro.indices for t, yes in enumerate(counted[i]) if yes and t]
    return torch.tensor(numbers, dtype=torch.float).to(micro.ids_T.device)
