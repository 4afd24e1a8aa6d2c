"""What torch can use of this machine: its GPUs, for placing engines and learners, and products in bf16 of its CPU."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class VisibleGpu(NamedTuple):
    """A GPU of this machine."""

    id: str
    """As CUDA_VISIBLE_DEVICES names it."""
    name: str
    bytes: int
    """Size of its memory."""


def gpus() -> list[VisibleGpu]:
    """The GPUs that this build of torch can use, in its order. Creates no CUDA context."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = shown.split(",") if shown else map(str, range(count))
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [VisibleGpu(id.strip(), gpu.name, gpu.total_memory) for id, gpu in zip(ids, found, strict=False)]


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has products in bf16 for this CPU, as with AVX-512; torch's own have a tenth of fp32's speed."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_tiles() -> bool:
    """Whether oneDNN computes products in bf16 with AMX, which rounds a row by how many rows stand beside it."""
    return bool(torch.cpu._is_amx_tile_supported())


def free_bytes(index: int) -> int:
    """Free memory of a GPU."""
    return torch.cuda.mem_get_info(index)[0]
