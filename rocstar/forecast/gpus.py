"""GPUs that can be planned for, by their makers' data sheets: dense bf16 operations, without sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    memory_bytes: float
    flops: float
    """bf16 operations a second."""
    bandwidth: float
    """Of its memory, bytes a second."""


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu(memory_bytes=141e9, flops=989e12, bandwidth=4.8e12),
    "h100": Gpu(memory_bytes=80e9, flops=989e12, bandwidth=3.35e12),
    "mi300x": Gpu(memory_bytes=192e9, flops=1307e12, bandwidth=5.3e12),
    "a100": Gpu(memory_bytes=80e9, flops=312e12, bandwidth=2.04e12),
    "4090": Gpu(memory_bytes=24e9, flops=165e12, bandwidth=1.01e12),
}
