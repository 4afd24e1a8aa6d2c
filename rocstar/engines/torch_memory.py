"""What the KV cache of the torch engine takes, and what there is to take it from on the model's device."""

from __future__ import annotations

from typing import Any

import torch

from rocstar.engines.memory import cache_bytes, host_bytes, refuse_too_many_tokens
from rocstar.engines.torch_cache import cache_shape


def kv_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `tokens` tokens, for a transformers config."""
    return cache_bytes(cache_shape(config), tokens, dtype.itemsize)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`; on a CPU within this process's memory group too."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes()


def refuse_what_does_not_fit(model: Any, tokens: int) -> None:
    """Raises ConfigError when the cache would take more than there is."""
    refuse_too_many_tokens(kv_bytes(model.config, tokens, model.dtype), available_bytes(model.device), tokens)
