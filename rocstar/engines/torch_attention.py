"""Attention over a cache of slots, as a transformers attention function.

Any transformers causal LM that takes its attention from the library's registry runs on our cache unchanged: it
projects and rotates, hands new keys and values to `SlotCache.update`, and calls `attend` on what comes back.

Grouped heads are folded into the query axis, so keys are never repeated. Every row's result is independent of the
other rows in the batch, bit for bit on CPU (tests/engines/test_invariance.py): matrix products there keep one
summation order from MIN_QUERIES rows up and to PIECE terms a sum, and masked positions add exact zeros. On AVX-512
machines that needs MKL's strict mode, set before torch loads (`rocstar.launch.quiet_torch`). This holds for models
whose head and MLP widths are multiples of 32; element-wise kernels treat what is left over apart.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from rocstar.errors import ConfigError

NAME = "rocstar"
MIN_QUERIES = 4  # rows; CPU matrix products take another summation order below it
PIECE = 128  # positions summed in one product; longer sums are blocked by their length, which depends on neighbours


def attend(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, K, L, D], attention_mask [B, 1, T, L] added to the scores.

    Returns [B, T, H, D]. Source: ours."""
    rows, heads, steps, width = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    count = groups * steps
    folded = _at_least(MIN_QUERIES, (query * scaling).reshape(rows, kv_heads, count, width))
    scores = torch.matmul(folded, key.transpose(2, 3))[:, :, :count]
    scores = scores.view(rows, kv_heads, groups, steps, -1)
    if attention_mask is not None:
        scores += attention_mask.unsqueeze(1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = _mix(_at_least(MIN_QUERIES, weights.reshape(rows, kv_heads, count, -1)), value)[:, :, :count]
    return mixed.reshape(rows, heads, steps, width).transpose(1, 2).contiguous(), None


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


def use_slot_attention(model: Any) -> None:
    """Make `model` attend through `attend`. Raises ConfigError for models whose layers do not all attend fully."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the torch engine runs models with full attention in every layer, this one has {sorted(kinds)}; "
            "use another engine for it"
        )
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
