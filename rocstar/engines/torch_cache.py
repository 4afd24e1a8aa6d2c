"""The KV cache of the torch engine: a fixed number of rows, each one sequence, active rows always in front.

    rows    0 1 2 3 4 5 6 7
            A A A P P . . .     A decoding now, P paused (its tool is running), . free

Active rows are a prefix, so a decode step reads plain views and never gathers. `swap` moves rows between regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SlotCache:
    """Keys and values of all layers in one tensor [2 * layers, rows, kv_heads, positions + 1, head_dim].

    The last position is scratch: padding of a prefill is written there. Before each forward pass the caller says
    which rows (`rows`, a tensor of indices, or None for the first n) and positions the new tokens go to, and how
    many positions are read back (`length`)."""

    is_compileable = False

    def __init__(self, model: Any, rows: int, positions: int) -> None:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2 * config.num_hidden_layers, rows, heads, positions + 1, width)
        self.store = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.positions = positions
        self._rows: torch.Tensor | None = None
        self._write_rows = torch.empty(0)
        self._write_positions = torch.empty(0)
        self._length = 0

    def aim(self, rows: torch.Tensor | None, positions_NT: torch.Tensor, length: int) -> None:
        """Set where the next forward pass writes ([N, T] positions) and how many positions it reads."""
        self._rows = rows
        count = positions_NT.shape[0]
        indices = torch.arange(count, device=self.store.device) if rows is None else rows
        self._write_rows = indices.unsqueeze(1).expand_as(positions_NT)
        self._write_positions = positions_NT
        self._length = length

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *unused: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer with [N, K, T, D]; returns everything those rows hold, [N, K, L, D]."""
        keys, values = self.store[2 * layer], self.store[2 * layer + 1]
        keys[self._write_rows, :, self._write_positions] = key.transpose(1, 2)
        values[self._write_rows, :, self._write_positions] = value.transpose(1, 2)
        if self._rows is None:
            count = key.shape[0]
            return keys[:count, :, : self._length], values[:count, :, : self._length]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by transformers; positions are always given explicitly, so nothing depends on it."""
        return self._length

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Row contents `targets[i] <- sources[i]`, all at once, first `length` positions."""
        if sources:
            self.store[:, list(targets), :, :length] = self.store[:, list(sources), :, :length]

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give `targets` the first `length` positions of `source` (siblings share their prompt)."""
        if targets and length:
            self.store[:, list(targets), :, :length] = self.store[:, source : source + 1, :, :length]
