"""Triton kernels for the compact forward's operations between matrix products on a GPU: one kernel instead of several.

Nothing here reads a number back from the GPU, so that a step can be captured as a CUDA graph. Sums are in fp32 and
results are rounded where torch's own operations round them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rocstar.engines.pages import PAGE

STEP = 64  # positions at once
WARPS = 4
LEAST = 16  # minimum rows of tl.dot
BLOCK = 1024  # numbers of a gated MLP that one program multiplies

# -- attention over pages --------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, mixed, tables, rows, positions, table_stride, query_stride, scaling, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    own, row = tl.load(positions + token), tl.load(rows + token)
    first = tl.where(window > 0, tl.maximum(own - window + 1, 0), 0)
    q, d = tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    heads = head * GROUP + q
    real = (q[:, None] < GROUP) & (d[None, :] < WIDTH)
    asked = tl.load(query + token * query_stride + heads[:, None] * WIDTH + d[None, :], mask=real, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, COLUMNS], tl.float32)
    within = tl.arange(0, PAGE)
    each = tl.arange(0, STEP // PAGE)
    for start in range(first // STEP * STEP, own + 1, STEP):
        places = start + tl.arange(0, STEP)
        seen = (places >= first) & (places <= own)
        begins = start + each * PAGE
        held = (begins + PAGE > first) & (begins <= own)
        page = tl.load(tables + row * table_stride + start // PAGE + each, mask=held, other=0).to(tl.int64)
        base = (page * KV_HEADS + head) * WIDTH * PAGE
        # Three axes, so that the compiler sees that a page's numbers are contiguous.
        key = tl.load(
            keys + base[None, :, None] + d[:, None, None] * PAGE + within[None, None, :],
            mask=(d[:, None, None] < WIDTH) & held[None, :, None],
            other=0.0,
        )
        key = tl.where(seen[None, :], tl.reshape(key, [COLUMNS, STEP]), 0.0)
        scores = tl.dot(asked, key, input_precision="ieee") * scaling
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights, kept = tl.exp(scores - higher[:, None]), tl.exp(best - higher)
        value = tl.load(
            values + base[:, None, None] + within[None, :, None] * WIDTH + d[None, None, :],
            mask=held[:, None, None] & (d[None, None, :] < WIDTH),
            other=0.0,
        )
        value = tl.where(seen[:, None], tl.reshape(value, [STEP, COLUMNS]), 0.0)
        found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        best = higher
    place = mixed + (token * KV_HEADS * GROUP + heads[:, None]) * WIDTH + d[None, :]
    tl.store(place, (found / total[:, None]).to(mixed.dtype.element_ty), mask=real)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, aim: Any, scaling: float, window: int) -> Any:
    """query [T, heads, D], keys [pages, kv_heads, D, PAGE], values [pages, kv_heads, PAGE, D] -> [T, heads, D], each
    token over the positions up to its own, or over the last `window` of them.

    One program computes the queries of one token that share a key head, STEP positions at a time, with a running
    maximum and sum (FlashAttention's online softmax, arXiv 2205.14135)."""
    tokens, heads, width = query.shape
    if query.stride()[1:] != (width, 1):
        query = query.contiguous()
    mixed = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
    kv_heads = keys.shape[1]
    _attend[(tokens, kv_heads)](
        query, keys, values, mixed, aim.tables, aim.rows, aim.positions,
        aim.tables.stride(0), query.stride(0), scaling, window,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, WIDTH=width, PAGE=PAGE, STEP=STEP,
        QUERIES=max(LEAST, triton.next_power_of_2(heads // kv_heads)),
        COLUMNS=max(LEAST, triton.next_power_of_2(width)), num_warps=WARPS,
    )  # fmt: skip
    return mixed


# -- rotation, and keys and values into their pages ------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    projected, cos, sin, query_norm, key_norm, queries, keys, values, positions, pages, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, COLUMNS)
    real = d < WIDTH
    place = tl.load(positions + token)
    page, offset = tl.load(pages + token), place % PAGE
    begin = projected + (token * (HEADS + 2 * KV_HEADS) + head) * WIDTH
    own = tl.load(begin + d, mask=real, other=0.0)
    if head >= HEADS + KV_HEADS:
        base = (page * KV_HEADS + head - HEADS - KV_HEADS) * PAGE + offset
        tl.store(values + base * WIDTH + d, own.to(values.dtype.element_ty), mask=real)
    else:
        here, there = d, (d + WIDTH // 2) % WIDTH
        x = own.to(tl.float32)
        y = tl.load(begin + there, mask=real, other=0.0).to(tl.float32)
        if NORMED:
            asks = real & (head + 0 * d < HEADS)
            gives = real & (head + 0 * d >= HEADS)
            scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
            x *= scale * (tl.load(query_norm + here, asks, 0.0) + tl.load(key_norm + here, gives, 0.0))
            y *= scale * (tl.load(query_norm + there, asks, 0.0) + tl.load(key_norm + there, gives, 0.0))
        turned = x * tl.load(cos + place * WIDTH + d, real, 0.0) + y * tl.load(sin + place * WIDTH + d, real, 0.0)
        if head < HEADS:
            tl.store(queries + (token * HEADS + head) * WIDTH + d, turned.to(queries.dtype.element_ty), mask=real)
        else:
            base = (page * KV_HEADS + head - HEADS) * WIDTH
            tl.store(keys + (base + d) * PAGE + offset, turned.to(keys.dtype.element_ty), mask=real)


def turn(
    projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: Any, keys: torch.Tensor, values: torch.Tensor,
    aim: Any,
) -> torch.Tensor:  # fmt: skip
    """Rotate the queries and keys of `projected`, [T, heads + 2 kv_heads, D], after their `norms` where there are some;
    write keys and values to the pages of the tokens; and return the queries, [T, heads, D]. cos, sin: [positions, D],
    the first half of sin negative."""
    tokens, several, width = projected.shape
    kv_heads = keys.shape[1]
    heads = several - 2 * kv_heads
    queries = torch.empty((tokens, heads, width), dtype=keys.dtype, device=keys.device)
    first, second = (norm.weight for norm in norms) if norms else (cos, cos)
    _turn[(tokens, several)](
        projected, cos, sin, first, second, queries, keys, values, aim.positions, aim.pages,
        norms[0].variance_epsilon if norms else 0.0,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, COLUMNS=triton.next_power_of_2(width), PAGE=PAGE,
        NORMED=bool(norms), num_warps=1,
    )  # fmt: skip
    return queries


# -- sums between layers and their norms, and the gate of an MLP -----------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _add_normed(hidden, more, weight, normed, epsilon, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, d = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, COLUMNS)
    real = d < WIDTH
    sums = tl.load(hidden + row + d, mask=real, other=0.0)
    if ADDS:
        sums += tl.load(more + row + d, mask=real, other=0.0).to(tl.float32)
        tl.store(hidden + row + d, sums, mask=real)
    scale = tl.rsqrt(tl.sum(sums * sums, 0) / WIDTH + epsilon)
    scaled = sums * scale * tl.load(weight + d, mask=real, other=0.0)
    tl.store(normed + row + d, scaled.to(normed.dtype.element_ty), mask=real)


def add_normed(hidden: torch.Tensor, more: torch.Tensor | None, norm: Any, dtype: torch.dtype) -> torch.Tensor:
    """Add `more` to `hidden`, [T, hidden] fp32, in place, and return its RMS norm in `dtype`."""
    normed = torch.empty_like(hidden, dtype=dtype)
    tokens, width = hidden.shape
    _add_normed[(tokens,)](
        hidden, hidden if more is None else more, norm.weight, normed, norm.variance_epsilon,
        WIDTH=width, COLUMNS=triton.next_power_of_2(width), ADDS=more is not None, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return normed


@triton.jit  # type: ignore[untyped-decorator]
def _gated(both, found, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < WIDTH
    gate = tl.load(both + 2 * row * WIDTH + d, mask=real, other=0.0).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * WIDTH + d, mask=real, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(found.dtype.element_ty).to(tl.float32)
    tl.store(found + row * WIDTH + d, (silu * up).to(found.dtype.element_ty), mask=real)


def gated(both: torch.Tensor) -> torch.Tensor:
    """[T, 2 I], gates and gated values, -> [T, I]."""
    tokens, width = both.shape[0], both.shape[1] // 2
    found = torch.empty((tokens, width), dtype=both.dtype, device=both.device)
    _gated[(tokens, triton.cdiv(width, BLOCK))](both, found, WIDTH=width, BLOCK=BLOCK)
    return found
