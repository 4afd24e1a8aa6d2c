"""The KV cache of the torch engine: pages of keys and values, and which tokens of which sequences are fed next."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch

from rocstar.engines.pages import PAGE


@dataclass(frozen=True, slots=True)
class Aim:
    """The T tokens of one forward pass, those of one sequence side by side and in order."""

    rows: torch.Tensor
    """[T] int64: row of `tables` for each token."""
    positions: torch.Tensor
    """[T] int64: its place in its sequence; it attends to all up to that."""
    pages: torch.Tensor
    """[T] int64: page that its key and value go to."""
    tables: torch.Tensor
    """[rows, pages] int32: the pages of each sequence, in order."""


class PagedCache:
    """`keys` [layers, pages + 1, kv_heads, head_dim, PAGE] and `values` [..., PAGE, head_dim]; page 0 is scratch.

    Keys lie transposed: the scores of a page's positions are then computed side by side. The caller sets `aim` before
    each forward pass. Main memory is taken page by page as they are written, until `release`. Stands in for a
    transformers cache where a model's own forward runs."""

    is_compileable = False

    def __init__(self, model: Any, pages: int) -> None:
        layers, heads, width = cache_shape(model.config)
        self._maps: list[mmap.mmap] = []
        self.keys = self._zeros((layers, pages + 1, heads, width, PAGE), model.dtype, model.device)
        self.values = self._zeros((layers, pages + 1, heads, PAGE, width), model.dtype, model.device)
        self.aim: Aim

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take keys and values of the new tokens, each [T, kv_heads, head_dim]."""
        pages, offsets = self.aim.pages, self.aim.positions % PAGE
        self.keys[layer][pages, :, :, offsets] = keys
        self.values[layer][pages, :, offsets] = values

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *unused: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer of transformers with [1, kv_heads, T, head_dim]."""
        self.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by transformers; positions are always given explicitly, so nothing depends on it."""
        return 0

    def copy_page(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def release(self) -> None:
        """Nobody holds a page: main memory goes back to the system, and is zero when it is taken again."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """On a CPU straight from the system: torch.zeros writes to all of it, and so takes all of it at once."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        self._maps.append(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return torch.frombuffer(self._maps[-1], dtype=dtype).view(shape)

    def clear(self, pages: list[int] | None = None) -> None:
        """Zeros in these, or in all: masked positions are multiplied by zero, which leaves what is not finite as it
        is."""
        if pages is None and self._maps:
            self.release()
        else:
            self.keys[:, slice(None) if pages is None else pages] = 0
            self.values[:, slice(None) if pages is None else pages] = 0


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key heads and width of a head of a transformers config."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, heads, width
