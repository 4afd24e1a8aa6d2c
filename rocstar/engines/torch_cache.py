"""The KV cache of the torch engine: a fixed number of rows, each one sequence, active rows always in front.

    rows    0 1 2 3 4 5 6 7
            A A A P P . . .     A decoding now, P paused (its tool is running), . free

Active rows are a prefix, so a decode step reads plain views and never gathers. `move` carries rows between regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SlotCache:
    """`keys` [layers, rows, kv_heads, head_dim, positions + 1] and `values` [..., positions + 1, head_dim].

    Keys lie transposed: a product with few queries then reads them in order, which takes two thirds of the time on a
    CPU. The last position is scratch: padding of a prefill is written there. Before each forward pass the caller says
    which rows (`rows`, a tensor of indices, or None for the first n) and positions the new tokens go to, and how many
    positions are read back (`length`)."""

    is_compileable = False

    def __init__(self, model: Any, rows: int, positions: int) -> None:
        layers, heads, width = cache_shape(model.config)
        self.keys = torch.zeros((layers, rows, heads, width, positions + 1), dtype=model.dtype, device=model.device)
        self.values = torch.zeros((layers, rows, heads, positions + 1, width), dtype=model.dtype, device=model.device)
        self.positions = positions
        self._read_rows: slice | torch.Tensor = slice(0)
        self._write_rows = torch.empty(0)
        self._write_positions = torch.empty(0)
        self._length = 0

    def aim(self, rows: torch.Tensor | None, positions_NT: torch.Tensor, length: int) -> None:
        """Set where the next forward pass writes ([N, T] positions) and how many positions it reads."""
        count, steps = positions_NT.shape
        self._read_rows = slice(count) if rows is None else rows
        indices = torch.arange(count, device=positions_NT.device) if rows is None else rows
        self._write_rows = indices.repeat_interleave(steps)
        self._write_positions = positions_NT.reshape(-1)
        self._length = length

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take keys and values of the new tokens, each [N * T, kv_heads, head_dim]."""
        self.keys[layer][self._write_rows, :, :, self._write_positions] = keys
        self.values[layer][self._write_rows, :, self._write_positions] = values

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything the rows hold: keys and values, each [N, kv_heads, L, head_dim]."""
        keys = self.keys[layer][self._read_rows, ..., : self._length].transpose(2, 3)
        return keys, self.values[layer][self._read_rows, :, : self._length]

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *unused: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer of transformers with [N, K, T, D]; writes, then reads."""
        self.write(layer, key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1))
        return self.read(layer)

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by transformers; positions are always given explicitly, so nothing depends on it."""
        return self._length

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Row contents `targets[i] <- sources[i]`, all at once, first `length` positions."""
        if sources and length:
            self.keys[:, list(targets), ..., :length] = self.keys[:, list(sources), ..., :length]
            self.values[:, list(targets), :, :length] = self.values[:, list(sources), :, :length]

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give `targets` the first `length` positions of `source` (siblings share their prompt)."""
        if targets and length:
            self.keys[:, list(targets), ..., :length] = self.keys[:, source : source + 1, ..., :length]
            self.values[:, list(targets), :, :length] = self.values[:, source : source + 1, :, :length]

    def clear(self) -> None:
        """Zeros everywhere: masked positions are multiplied by zero, which leaves what is not finite as it is."""
        self.keys.zero_()
        self.values.zero_()


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key heads and width of a head of a transformers config."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, heads, width
