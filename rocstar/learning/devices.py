"""The GPUs of this machine."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    name: str
    bytes: int
    """Of its memory."""
    free_bytes: int
    """Of its memory, now."""


def gpus() -> list[Gpu]:
    """Those that this build of torch can use, in its order."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return found


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU here; None without one. Asks only what needs no context on the GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_properties(place).total_memory for place in range(count)), default=None)
