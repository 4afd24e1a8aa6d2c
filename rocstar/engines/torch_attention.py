"""Attention over a cache of slots, as a transformers attention function.

Any transformers causal LM that takes its attention from the library's registry runs on our cache unchanged: it
projects and rotates, hands new keys and values to `SlotCache.update`, and calls `attend` on what comes back.

Grouped heads are folded into the query axis, so keys are never repeated. Every row's result is independent of the
other rows in the batch, bit for bit on CPU (tests/engines/test_invariance.py): matrix products there keep one
summation order from four rows up, and masked positions add exact zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from rocstar.errors import ConfigError

NAME = "rocstar"


def attend(
    module: torch.nn.Module,
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
    folded = query.reshape(rows, kv_heads, groups * steps, width)
    scores = torch.matmul(folded, key.transpose(2, 3)).mul_(scaling).view(rows, kv_heads, groups, steps, -1)
    if attention_mask is not None:
        scores = scores + attention_mask.unsqueeze(1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(rows, kv_heads, groups * steps, -1), value)
    return mixed.view(rows, heads, steps, width).transpose(1, 2).contiguous(), None


def use_slot_attention(model: Any) -> None:
    """Make `model` attend through `attend`. Raises ConfigError for models whose layers do not all attend fully."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"the torch engine runs models with full attention in every layer, this one has {sorted(kinds)}; "
            "use another engine for it"
        )
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
