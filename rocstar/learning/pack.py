"""Rows to padded tensors: sorted by length and cut into micro-batches under a token budget.

    rows    A A A A | B B | C C C       budget 6 padded tokens, longest last
    packed  [B B 0]  [A A A A]
            [C C C]

Sorting happens only inside one optimizer step, so no step sees one kind of behaviour only. Row order inside a step
does not change its gradient except for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rocstar.types import BatchRow, SftRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Padded tensors of some rows; every [N, T - 1] tensor talks about tokens 1..T-1."""

    indices: tuple[int, ...]
    """Which rows of the batch these are."""
    ids_NT: torch.Tensor
    """Right-padded with 0."""
    mask_NT: torch.Tensor
    """[N, T - 1] float: 1 where the policy wrote the token, 0 elsewhere and on padding."""
    real_NT: torch.Tensor
    """[N, T - 1] float: 1 on real tokens."""


def plan(lengths: Sequence[int], tokens_per_microbatch: int) -> list[tuple[int, ...]]:
    """Indices of each micro-batch, every row exactly once; a row longer than the budget gets its own."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not batches or (len(batches[-1]) + 1) * lengths[index] > tokens_per_microbatch:
            batches.append([])
        batches[-1].append(index)
    return [tuple(batch) for batch in batches]


def pack(rows: Sequence[BatchRow | SftRow], tokens_per_microbatch: int, device: torch.device) -> list[MicroBatch]:
    """Every row lands in exactly one micro-batch."""
    lengths = [len(row.token_ids) for row in rows]
    return [_pad(rows, indices, device) for indices in plan(lengths, tokens_per_microbatch)]


def _pad(rows: Sequence[BatchRow | SftRow], indices: tuple[int, ...], device: torch.device) -> MicroBatch:
    longest = max(len(rows[i].token_ids) for i in indices)
    ids = torch.zeros(len(indices), longest, dtype=torch.long)
    mask = torch.zeros(len(indices), longest)
    real = torch.zeros(len(indices), longest)
    for place, index in enumerate(indices):
        length = len(rows[index].token_ids)
        ids[place, :length] = torch.tensor(rows[index].token_ids)
        mask[place, :length] = torch.tensor(rows[index].loss_mask, dtype=torch.float)
        real[place, :length] = 1
    return MicroBatch(
        indices=indices, ids_NT=ids.to(device), mask_NT=mask[:, 1:].to(device), real_NT=real[:, 1:].to(device)
    )


def spread(values: Sequence[Sequence[float]], micro: MicroBatch) -> torch.Tensor:
    """Per-token numbers of the batch's rows ([T] each) as [N, T - 1] for one micro-batch, 0 on padding."""
    out = torch.zeros(micro.mask_NT.shape)
    for place, index in enumerate(micro.indices):
        row = torch.tensor(values[index], dtype=torch.float)
        out[place, : len(row) - 1] = row[1:]
    return out.to(micro.ids_NT.device)
