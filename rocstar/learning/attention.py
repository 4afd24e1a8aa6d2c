"""Attention of packed documents: several rows lie in one sequence, and none may see another.

    rows       P Q A0 | P Q B0 B1 | P C1 C2 C3          all share P, siblings share their prompt P Q
    sequence   P Q A0 B0 B1 C1 C2 C3                    positions 0 1 2 2 3 1 2 3
    documents  [P Q A0 -]  [P Q B0 B1]  [P C1 C2 C3]    those of similar length share one causal SDPA call

Queries, keys and values are laid out as documents before the calls, so a shared token stands in each document that
starts with it; the first one's output goes back to the sequence, and the token's gradient is the sum over all.

Only sliding windows need a mask: on the CPU a dense one costs four times as much (97 ms against 22.8 for six documents
in 2,048 tokens), and flex or varlen attention has no backward pass there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

PACKED_SDPA = "rocstar_packed_sdpa"
LIKE_LENGTH = 1.15  # documents within this ratio share a call: at most a third more work, and far fewer calls
SHORT = 32  # tokens; up to this length the call costs more than the arithmetic
GPU_PADDED = 1.33  # a GPU outruns its kernel launches: fewer calls, with at most a third of padding
Document = Sequence[tuple[int, int]]
"""Where the tokens of a row lie in the sequence: (first token, how many) of each run. All but the last may be shared
with other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLayout:
    """How a sequence of T tokens is laid out as documents: S places, padding behind the shorter ones of a call."""

    calls: tuple[tuple[int, int], ...]
    """(documents, places of each) of every SDPA call."""
    tokens_S: torch.Tensor
    """Which token stands at each place."""
    places_T: torch.Tensor
    """Where the output of each token is read: in the first document that contains it."""


def layout_of(documents: Sequence[Document], device: torch.device, *, side_by_side: bool = False) -> DocumentLayout:
    """Lays out documents given in the order of the sequence, shortest first. side_by_side: all in one call."""
    lengths = [sum(count for _, count in document) for document in documents]
    calls = ((len(lengths), max(lengths)),) if side_by_side else calls_of(lengths, device.type)
    widths = [longest for count, longest in calls for _ in range(count)]
    tokens: list[int] = []
    for document, length, width in zip(documents, lengths, widths, strict=True):
        tokens.extend(token for first, count in document for token in range(first, first + count))
        tokens.extend([document[-1][0]] * (width - length))
    first_place = dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))
    places = [first_place[token] for token in range(len(first_place))]
    tokens_S, places_T = (torch.tensor(each).to(device) for each in (tokens, places))
    return DocumentLayout(calls=calls, tokens_S=tokens_S, places_T=places_T)


def calls_of(lengths: Sequence[int], device: str) -> tuple[tuple[int, int], ...]:
    """Neighbours of similar length share a call: (documents, tokens of the longest). device: cpu or cuda."""
    calls: list[tuple[int, int]] = []
    shortest = tokens = 0
    for length in lengths:
        count, tokens = calls[-1][0] + 1 if calls else 1, tokens + length
        alike = length <= max(shortest * LIKE_LENGTH, shortest + SHORT)
        if calls and (count * length <= GPU_PADDED * tokens if device == "cuda" else alike):
            calls[-1] = count, length
        else:
            calls.append((1, length))
            shortest = tokens = length
    return tuple(calls)


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
        length, mask_TT, grouped = q.shape[2], None, q.shape[1] != k.shape[1]
        if sliding_window is not None and length > sliding_window:
            mask_TT = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        if grouped and q.is_cuda and (mask_TT is not None or q.dtype == torch.float32):
            # Kernels that share key heads need 16 bits and no mask; otherwise all scores would be kept.
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
            grouped = False
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask_TT, is_causal=mask_TT is None, scale=scaling, dropout_p=dropout, enable_gqa=grouped
        )

    with torch.autocast(query.device.type, enabled=False):
        # Under autocast rotated queries and keys are fp32, values are not, and a kernel takes one dtype.
        dtype = min((query.dtype, key.dtype, value.dtype), key=lambda each: each.itemsize)
        if query.device.type == "cpu":  # the bf16 kernel's backward pass takes ten times as long as the fp32 one's
            dtype = torch.float32
        parts = [tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value)]  # [T, heads, D]
        documents = [_documents(part, layout) for part in parts]
        outputs = [call(*qkv).transpose(1, 2).flatten(0, 1) for qkv in zip(*documents, strict=True)]
        output = torch.cat(outputs).index_select(0, layout.places_T)
    return output.unsqueeze(0).to(query.dtype), None


def _documents(tokens_THD: torch.Tensor, layout: DocumentLayout) -> list[torch.Tensor]:
    """[documents, heads, tokens, D] of each call."""
    places_SHD = tokens_THD.index_select(0, layout.tokens_S)  # padding repeats a token; no real token attends to it
    parts = torch.split(places_SHD, [count * length for count, length in layout.calls])
    shapes = [(*call, *tokens_THD.shape[1:]) for call in layout.calls]
    return [part.reshape(shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]
