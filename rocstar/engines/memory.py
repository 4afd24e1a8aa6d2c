"""Memory of the torch engine's KV cache, and the available main memory. Loads no torch, so that a recipe can be checked
before anything starts."""

from __future__ import annotations

from pathlib import Path

from rocstar.engines.pages import PAGE
from rocstar.errors import ConfigError

CGROUPS = (  # limit and use of this process's memory group, bytes; version 2, then version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
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


def host_bytes() -> int:
    """Main memory that this process can still take, within its memory group."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    there = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for limit, used in CGROUPS:
        if Path(limit).is_file() and (most := Path(limit).read_text().strip()) != "max":
            there.append(max(0, int(most) - int(Path(used).read_text())))
    return min(there)


def refuse_too_many_tokens(needed: int, there: int, tokens: int) -> None:
    """Raises ConfigError when a cache of `needed` bytes would take more than there is."""
    if needed > there:
        raise ConfigError(
            f"the keys and values of {tokens} tokens take {needed / 1e9:.1f} GB and {there / 1e9:.1f} GB of memory are "
            "available; lower rollout.kv_tokens, or if it is not set rollout.engine_rows or "
            "rollout.max_response_tokens, which determine it"
        )
