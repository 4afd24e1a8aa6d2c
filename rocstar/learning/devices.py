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
