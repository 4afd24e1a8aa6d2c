"""Attention of packed documents: several rows lie in one sequence, and none may see another.

    rows       P Q A0 | P Q B0 B1 | P C1 C2 C3          all share P, siblings share their prompt P Q
    sequence   P Q A0 B0 B1 C1 C2 C3                    positions 0 1 2 2 3 1 2 3
    documents  [P Q A0 -]  [P Q B0 B1]  [P C1 C2 C3]    those of like length share one causal SDPA call

Queries, keys and values are laid out as documents before the calls, so a shared token stands in each document that it
begins; what comes out of the first of them goes back to the sequence, and its gradient is the sum over all.

There is no mask but for sliding windows: on the CPU a dense one costs four times as much (97 ms against 22.8 for six
documents in 2,048 tokens), and flex or varlen attention has no backward pass there. On CUDA flash-attention does the
same through transformers where it is installed, without shared tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

PACKED_SDPA = "rocstar_packed_sdpa"
LIKE_LENGTH = 1.15  # documents within this ratio share a call: at most a third more work, and far fewer calls
SHORT = 32  # tokens; within so many, the call costs more than the arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Where the tokens of a row lie in the sequence."""

    parts: tuple[tuple[int, int], ...]
    """(first token, how many) of each run of its tokens; the last is its own, those before it may be shared."""
    new: int
    """How many of the parts, the last ones, no earlier document has: they lie one behind the other in the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLayout:
    """How a sequence of T tokens is laid out as documents: S places, padding behind the shorter ones of a call."""

    calls: tuple[tuple[int, int], ...]
    """(documents, places of each) of every SDPA call."""
    tokens_S: torch.Tensor
    """Which token stands at each place."""
    places_T: torch.Tensor
    """Where the output of each token is read."""
    repeats: torch.Tensor
    """Places whose token is read at another one."""


def layout_of(documents: Sequence[Document], device: torch.device, *, side_by_side: bool = False) -> DocumentLayout:
    """Lays out documents, which come in the order of the sequence, shortest first. side_by_side: all in one call."""
    lengths = [sum(count for _, count in document.parts) for document in documents]
    calls = ((len(lengths), max(lengths)),) if side_by_side else _calls(lengths)
    widths = [longest for count, longest in calls for _ in range(count)]
    tokens: list[int] = []
    places: list[int] = []
    repeats: list[int] = []
    for document, width in zip(documents, widths, strict=True):
        begin, old = len(tokens), len(document.parts) - document.new
        for place, (first, count) in enumerate(document.parts):
            (repeats if place < old else places).extend(range(len(tokens), len(tokens) + count))
            tokens.extend(range(first, first + count))
        tokens.extend([document.parts[-1][0]] * (width - (len(tokens) - begin)))
    tensors = [torch.tensor(each).to(device) for each in (tokens, places, repeats)]
    return DocumentLayout(calls=calls, tokens_S=tensors[0], places_T=tensors[1], repeats=tensors[2].long())


def _calls(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(documents, tokens of the longest) of neighbours of like length."""
    calls: list[tuple[int, int]] = []
    shortest = 0
    for length in lengths:
        if calls and length <= max(shortest * LIKE_LENGTH, shortest + SHORT):
            calls[-1] = calls[-1][0] + 1, length
        else:
            calls.append((1, length))
            shortest = length
    return tuple(calls)


class _Spread(torch.autograd.Function):
    """[T, ...] -> [S, ...]. Padding repeats a token: causal attention keeps it from every real one, so its gradient
    is 0, and that of a token is read at its own place and added from its repeats."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.tokens_S)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout: DocumentLayout = ctx.layout
        found = gradient.index_select(0, layout.places_T)
        found.index_add_(0, layout.tokens_S[layout.repeats], gradient.index_select(0, layout.repeats))
        return found, None


class _Gather(torch.autograd.Function):
    """[S, ...] -> [T, ...]; its gradient is a copy, where that of index_select would be a slow sum."""

    @staticmethod
    def forward(ctx: Any, places: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
        ctx.layout, ctx.size = layout, places.shape[0]
        return places.index_select(0, layout.places_T)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        places_T = ctx.layout.places_T
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, places_T, gradient.contiguous()), None


def gathered(places: torch.Tensor, layout: DocumentLayout) -> torch.Tensor:
    """[S, ...] -> [T, ...]: what was computed for the documents' places, for the sequence's tokens."""
    found: torch.Tensor = _Gather.apply(places, layout)  # type: ignore[no-untyped-call]
    return found


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    layout: DocumentLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """A transformers attention function. query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, T, heads, D].

    Calls with documents that exceed a sliding window get a mask, which costs more."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length, seen, grouped = q.shape[2], None, q.shape[1] != k.shape[1]
        if sliding_window is not None and length > sliding_window:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        if grouped and q.is_cuda and (seen is not None or q.dtype == torch.float32):
            # Kernels that share key heads want 16 bits and no mask; else all scores would be kept.
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
            grouped = False
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )

    with torch.autocast(query.device.type, enabled=False):
        # Under autocast rotated queries and keys are fp32, values are not, and a kernel takes one dtype.
        dtype = min((query.dtype, key.dtype, value.dtype), key=lambda each: each.itemsize)
        if query.device.type == "cpu":  # the bf16 kernel's backward pass takes ten times as long as the fp32 one's
            dtype = torch.float32
        parts = [tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value)]  # [T, heads, D]
        documents = [_documents(part, layout) for part in parts]
        outputs = [call(*qkv).transpose(1, 2).flatten(0, 1) for qkv in zip(*documents, strict=True)]
        output = gathered(torch.cat(outputs), layout)
    return output.unsqueeze(0).to(query.dtype), None


def _documents(tokens_THD: torch.Tensor, layout: DocumentLayout) -> list[torch.Tensor]:
    """[documents, heads, tokens, D] of each call."""
    places_SHD = _Spread.apply(tokens_THD, layout)  # type: ignore[no-untyped-call]
    parts = torch.split(places_SHD, [count * length for count, length in layout.calls])
    shapes = [(*call, *tokens_THD.shape[1:]) for call in layout.calls]
    return [part.reshape(shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]
