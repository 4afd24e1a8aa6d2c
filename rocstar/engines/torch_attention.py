"""Attention of new tokens to the pages of their sequences, also as a transformers attention function.

Any transformers causal LM that takes its attention from the library's registry runs on our cache unchanged: it
projects and rotates, hands new keys and values to `PagedCache.update`, and calls `_attend_in_library`.

Every token's result is independent of the other tokens in the batch, bit for bit on CPU (tests/engines/
test_invariance.py). The compiled form (`_attention.c`) computes each token by itself. The torch form, for GPUs and
where nothing could be compiled, keeps to what matrix products promise there: one summation order from MIN_QUERIES rows
up and to PIECE terms a sum, and masked positions add exact zeros. On AVX-512 machines that needs MKL's strict mode, set
before torch loads (`rocstar.support.threads`); so do the products outside attention. This holds for models whose
head and MLP widths are multiples of 32; element-wise kernels treat what is left over apart.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import AttentionInterface

from rocstar.engines.pages import PAGE
from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.errors import ConfigError

NAME = "rocstar"
MIN_QUERIES = 4  # rows; CPU matrix products take another summation order below it
PIECE = 128  # positions summed in one product; longer sums are blocked by their length, which depends on neighbours


class PagedAttention:
    """(layer, query [T, heads, head_dim], scaling) -> [T, heads, head_dim], over the tokens that `cache.aim` names."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._compiled = _compiled() if _fits_compiled(cache) else None

    def __call__(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        aim, keys, values = self._cache.aim, self._cache.keys[layer], self._cache.values[layer]
        if self._compiled is None:
            return _gathered(query, keys, values, aim, scaling)
        tokens, heads, width = query.shape
        if query.stride()[1:] != (width, 1):
            query = query.contiguous()
        mixed = torch.empty((tokens, heads, width), dtype=query.dtype)
        self._compiled.attend(
            query.dtype is torch.bfloat16,
            *(each.data_ptr() for each in (query, keys, values, mixed, aim.tables, aim.rows, aim.positions)),
            aim.tables.shape[1],
            tokens,
            query.stride(0),
            heads,
            keys.shape[1],
            width,
            scaling,
        )
        return mixed


def _compiled() -> Any:
    try:
        return import_module("rocstar.engines._attention")
    except ImportError:
        return None


def _fits_compiled(cache: PagedCache) -> bool:
    keys = cache.keys
    return keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16) and keys.shape[3] % PAGE == 0


def _gathered(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, aim: Aim, scaling: float) -> torch.Tensor:
    """The same in torch, over copies of the pages: sequences with one new token together, each other one by itself."""
    mixed = torch.empty_like(query)
    counts = torch.unique_consecutive(aim.rows, return_counts=True)[1]
    ends = counts.cumsum(0)
    single = counts == 1
    parts = [ends[single, None] - 1] if bool(single.any()) else []
    many = zip(ends[~single].tolist(), counts[~single].tolist(), strict=True)
    parts += [torch.arange(end - count, end, device=query.device)[None] for end, count in many]
    for tokens_NT in parts:
        positions_NT = aim.positions[tokens_NT]
        pages = int(positions_NT.max()) // PAGE + 1
        table = aim.tables[aim.rows[tokens_NT[:, 0]], :pages].long()
        key, value = keys[table].permute(0, 2, 3, 1, 4).flatten(3), values[table].transpose(1, 2).flatten(2, 3)
        mixed[tokens_NT] = _attend(query[tokens_NT].transpose(1, 2), key, value, positions_NT, scaling)
    return mixed


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions_NT: torch.Tensor, scaling: float
) -> torch.Tensor:
    """query [N, H, T, D], key [N, K, D, L], value [N, K, L, D] -> [N, T, H, D]. Grouped heads are folded into the query
    axis, so keys are never repeated."""
    rows, heads, steps, width = query.shape
    kv_heads, length = key.shape[1], key.shape[3]
    count = heads // kv_heads * steps
    folded = _at_least(MIN_QUERIES, (query * scaling).reshape(rows, kv_heads, count, width))
    scores = torch.matmul(folded, key)[:, :, :count].view(rows, kv_heads, -1, steps, length)
    later = torch.arange(length, device=key.device) > positions_NT.unsqueeze(-1)
    scores = scores.masked_fill(later[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = _mix(_at_least(MIN_QUERIES, weights.reshape(rows, kv_heads, count, -1)), value)[:, :, :count]
    return mixed.reshape(rows, heads, steps, width).transpose(1, 2)


def _at_least(count: int, queries: torch.Tensor) -> torch.Tensor:
    """[B, K, Q, D] with rows of zeros added where Q is below `count`."""
    lacking = count - queries.shape[2]
    return torch.nn.functional.pad(queries, (0, 0, 0, lacking)) if lacking > 0 else queries


def _mix(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """weights [B, K, Q, L] times value [B, K, L, D], PIECE positions at a time."""
    pieces = zip(torch.split(weights, PIECE, 3), torch.split(value, PIECE, 2), strict=True)
    first, *others = (torch.matmul(w, v) for w, v in pieces)
    for other in others:
        first += other
    return first


def use_paged_attention(model: Any, attention: PagedAttention) -> None:
    """Make `model` attend through `attention`. Raises ConfigError for models whose layers do not all attend fully."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the torch engine runs models with full attention in every layer, this one has {sorted(kinds)}; "
            "use another engine for it"
        )
    AttentionInterface.register(NAME, _attend_in_library)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.rocstar_attention = attention


def _attend_in_library(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **unused: Any
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, head_dim] -> [1, T, heads, head_dim]; keys and values are in the cache already."""
    return module.rocstar_attention(module.layer_idx, query[0].transpose(0, 1), scaling).unsqueeze(0), None
