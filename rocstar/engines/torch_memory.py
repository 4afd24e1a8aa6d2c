"""What the KV cache of the torch engine takes, and what there is to take it from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rocstar.engines.torch_cache import cache_shape
from rocstar.errors import ConfigError

SHARE = 0.5  # of the available memory, for `rows_that_fit`; activations and the learner need the rest
CGROUPS = (  # limit and use of this process's memory group, bytes; version 2, then version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def kv_bytes(config: Any, rows: int, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `rows` sequences of at most `positions` tokens, for a transformers config."""
    layers, heads, width = cache_shape(config)
    return 2 * layers * rows * heads * (positions + 1) * width * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on `device`; on a CPU within this process's memory group too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_bytes())


def rows_that_fit(model: Any, positions: int, most: int) -> int:
    """As many rows of `positions` tokens as SHARE of the available memory holds, at most `most`.

    Raises ConfigError when it holds none."""
    share = int(SHARE * available_bytes(model.device))
    rows = min(most, share // kv_bytes(model.config, 1, positions, model.dtype))
    if rows < 1:
        refuse_what_does_not_fit(model, 1, positions, available=share)
    return rows


def refuse_what_does_not_fit(model: Any, rows: int, positions: int, available: int | None = None) -> None:
    """Raises ConfigError when the cache would take more than there is."""
    needed = kv_bytes(model.config, rows, positions, model.dtype)
    there = available_bytes(model.device) if available is None else available
    if needed > there:
        raise ConfigError(
            f"the keys and values of {rows} sequences of {positions} tokens take {needed / 1e9:.1f} GB and "
            f"{there / 1e9:.1f} GB of memory are available; lower rollout.engine_rows or rollout.max_response_tokens"
        )


def _host_bytes() -> Iterator[int]:
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, used in CGROUPS:
        if Path(limit).is_file() and (most := Path(limit).read_text().strip()) != "max":
            yield max(0, int(most) - int(Path(used).read_text()))
