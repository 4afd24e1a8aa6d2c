"""Attention of packed documents: several rows lie end to end in one sequence, and none may see another.

    packed  A0 A1 A2 B0 B1 B2 C0 C1 C2 C3       one sequence, positions 0 1 2 0 1 2 0 1 2 3
    calls   [A B]  [C]                          documents of like length share one causal SDPA call

There is no mask: on the CPU a dense one costs four times as much (97 ms against 22.8 for six documents in 2,048
tokens), and flex or varlen attention has no backward pass there. On CUDA flash-attention does the same through
transformers where it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rocstar.errors import ConfigError

PACKED_SDPA = "rocstar_packed_sdpa"
LIKE_LENGTH = 1.15  # documents within this ratio share a call: at most a third more work, and far fewer calls
SHORT = 32  # tokens; within so many, the call costs more than the arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring documents that share one SDPA call."""

    begin: int
    """First token of the first of them."""
    end: int
    """Token after the last of them."""
    count: int
    """Documents."""
    longest: int
    """Tokens of the longest."""
    slots: torch.Tensor | None
    """[end - begin]: place of each token in [count * longest] where lengths differ; None where all are equal."""


def blocks_of(lengths: Sequence[int], device: torch.device) -> tuple[Block, ...]:
    """Blocks of documents that lie end to end, shortest first."""
    blocks: list[Block] = []
    begin = first = 0
    for following in range(1, len(lengths) + 1):
        shortest = lengths[first]
        if following < len(lengths) and lengths[following] <= max(shortest * LIKE_LENGTH, shortest + SHORT):
            continue
        blocks.append(_block(begin, lengths[first:following], device))
        begin, first = blocks[-1].end, following
    return tuple(blocks)


def _block(begin: int, lengths: Sequence[int], device: torch.device) -> Block:
    longest = max(lengths)
    slots = None
    if min(lengths) != longest:
        slots = torch.cat([torch.arange(n) + place * longest for place, n in enumerate(lengths)]).to(device)
    return Block(begin=begin, end=begin + sum(lengths), count=len(lengths), longest=longest, slots=slots)


class _Spread(torch.autograd.Function):
    """[T, ...] -> [S, ...] with row t at slots[t], zero elsewhere; the gradient is the plain gather."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return tokens.new_zeros(size, *tokens.shape[1:]).index_copy_(0, slots, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """The reverse of `_Spread`; its gradient is a copy, where that of index_select would be a slow sum."""

    @staticmethod
    def forward(ctx: Any, spread: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = spread.shape[0]
        return spread.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slots = ctx.saved_tensors[0]
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, slots, gradient.contiguous()), None


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    blocks: Sequence[Block],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function. query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, T, heads, D].

    Raises ConfigError for a document that is longer than the model's sliding window."""
    longest = max(block.longest for block in blocks)
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError(
            f"a row has {longest} tokens and the model attends over a sliding window of {sliding_window}, which the "
            "learner does not do; lower rollout.max_response_tokens"
        )
    call = partial(
        scaled_dot_product_attention,
        is_causal=True,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    with torch.autocast(query.device.type, enabled=False):
        parts = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, D]
        if query.device.type == "cpu":  # the bf16 kernel's backward pass takes ten times as long as the fp32 one's
            parts = [part.float() for part in parts]
        outputs = [_of_tokens(call(*(_of_documents(part, block) for part in parts)), block) for block in blocks]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0).to(query.dtype), None


def _of_documents(tokens_THD: torch.Tensor, block: Block) -> torch.Tensor:
    """The block's tokens as [count, heads, longest, D], zeros behind the shorter documents: causal attention keeps
    those from every real token."""
    tokens = tokens_THD[block.begin : block.end]
    if block.slots is not None:
        tokens = _Spread.apply(tokens, block.slots, block.count * block.longest)  # type: ignore[no-untyped-call]
    return tokens.reshape(block.count, block.longest, *tokens.shape[1:]).transpose(1, 2)


def _of_tokens(documents_NHLD: torch.Tensor, block: Block) -> torch.Tensor:
    """The reverse: [end - begin, heads, D]."""
    tokens = documents_NHLD.transpose(1, 2).flatten(0, 1)
    return tokens if block.slots is None else _Gather.apply(tokens, block.slots)  # type: ignore[no-untyped-call]
