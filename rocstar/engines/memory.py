"""Memory of the torch engine's KV cache. Loads no torch, so that a recipe can be checked before anything starts."""

from __future__ import annotations

from rocstar.engines.pages import PAGE
from rocstar.errors import ConfigError

CacheShape = tuple[int, int, int]
"""Layers, key heads and width of a head."""


def kv_pages(kv_tokens: int | None, rows: int, positions: int) -> int:
    """Pages of cache for `rows` sequences of at most `positions` tokens: `kv_tokens` in all, or by default enough for
    all sequences at their longest. Raises ConfigError when they can't hold one sequence."""
    longest = -(-positions // PAGE)
    if kv_tokens is None:
        return rows * longest
    if kv_tokens < positions:
        raise ConfigError(
            f"rollout.kv_tokens {kv_tokens} is less than the {positions} tokens of the longest attempt; raise it, or "
            "lower rollout.max_response_tokens"
        )
    return -(-kv_tokens // PAGE)


def cache_bytes(shape: CacheShape, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of `tokens` tokens; `itemsize`: of one number."""
    layers, heads, width = shape
    return 2 * layers * tokens * heads * width * itemsize


def refuse_too_many_tokens(needed: int, there: int, tokens: int) -> None:
    """Raises ConfigError when a cache of `needed` bytes would take more than there is."""
    if needed > there:
        raise ConfigError(
            f"the keys and values of {tokens} tokens take {needed / 1e9:.1f} GB and {there / 1e9:.1f} GB of memory are "
            "available; lower rollout.kv_tokens, or if it is not set rollout.engine_rows or "
            "rollout.max_response_tokens, which determine it"
        )
