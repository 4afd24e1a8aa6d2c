"""The states of recurrent layers (linear attention, short convolutions, Mamba) for each sequence, beside the pages.

Such a layer has no keys and values but a state that every token changes: it can't be rewound, and sequences can't share
it. So a sequence that continues differently is fed again from its first token (torch_table.py), and a row's state is
reset at position 0.

A pass holds the tokens of all sequences; here each such layer gets them sequence by sequence: single tokens of many
sequences at once, longer stretches one by one, cut at multiples of BLOCK positions and wherever a stretch began when it
was first fed. So sums depend only on the sequence, not on the rest of the pass nor on evictions, and results are
bit-identical.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.support.layers import BLOCK, RECURRENT_LAYERS, sum_in_float64

MIN_ROWS = 4  # tokens; CPU matrix products take another summation order below it
LANES = 32  # numbers that torch's CPU kernels take at once; the remainder of each head rounds differently
HEADS = ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads")
CACHE_NAMES = ("cache_params", "past_key_values")
"""transformers' names of the cache argument of such a layer."""
Piece = tuple[torch.Tensor, torch.Tensor, bool]
"""Tokens of sequences [N, n] by their places in the pass, the rows of these [N], and whether they are their first."""


class RecurrentStates:
    """One `LinearAttentionLayer` of transformers a layer, with the states of all rows."""

    def __init__(self, cache: PagedCache, config: Any) -> None:
        self._cache = cache
        heads = (getattr(config, name, None) or LANES for name in HEADS)
        self._multiple = max(MIN_ROWS, *(LANES // math.gcd(LANES, count) for count in heads))
        self._layers: dict[int, LinearAttentionLayer] = {}
        self._aimed: tuple[Aim, list[Piece]] | None = None

    def clear(self) -> None:
        self._layers.clear()

    def layer(self, module: Any, named: str, plain: Callable[..., Any], *first: torch.Tensor, **given: Any) -> Any:
        """Replaces the forward of `module`, which gets its hidden states [1, T, D] and the cache as argument
        `named`."""
        hidden = first[0] if first else given.pop("hidden_states")
        given.pop(named, None)
        mixed = torch.zeros_like(hidden)
        for tokens, rows, is_first in self._pieces():
            length = tokens.shape[1]
            lacking = -len(tokens) % (self._multiple if length == 1 else -(-MIN_ROWS // length))
            places = torch.cat((tokens, tokens[-1:].expand(lacking, -1)))
            some = self._taken(module.layer_idx, rows, len(places), is_first)
            its_cache = Cache(layers=[some] * (module.layer_idx + 1))  # of which the layer sees its own place
            found = plain(hidden[0, places], **{named: its_cache}, **given)
            mixed[0, tokens] = (found[0] if isinstance(found, tuple) else found)[: len(tokens)].to(mixed.dtype)
            self._keep(module.layer_idx, rows, some)
        return mixed

    def _pieces(self) -> list[Piece]:
        """The pieces of the pass that the cache is aimed at."""
        if self._aimed is None or self._aimed[0] is not self._cache.aim:
            self._aimed = self._cache.aim, list(_pieces(self._cache.aim))
        return self._aimed[1]

    def _taken(self, layer: int, rows: torch.Tensor, count: int, is_first: bool) -> LinearAttentionLayer:
        """A layer with the states of these rows, the last one's repeated up to `count`."""
        stored, fresh = self._layers.get(layer), LinearAttentionLayer()
        if is_first or stored is None:
            return fresh
        places = torch.cat((rows, rows[-1:].expand(count - len(rows))))
        for name in ("conv_states", "recurrent_states"):
            state = getattr(stored, name)[0]
            if state is not None:
                getattr(fresh, name)[0] = state[places]
                getattr(fresh, f"is_{name}_initialized")[0] = True
                fresh.has_previous_state[0] = True
        fresh.conv_kernel_size = dict(stored.conv_kernel_size)
        fresh.dtype, fresh.device = stored.dtype, stored.device
        return fresh

    def _keep(self, layer: int, rows: torch.Tensor, found: LinearAttentionLayer) -> None:
        stored = self._layers.setdefault(layer, found)
        for name in ("conv_states", "recurrent_states"):
            new, old = getattr(found, name)[0], getattr(stored, name)[0]
            if new is None:
                continue
            size = 0 if stored is found or old is None else len(old)
            most = int(rows.max()) + 1
            if most > size:
                grown = new.new_zeros((max(most, 2 * size), *new.shape[1:]))
                if size:
                    grown[:size] = old
                old = grown
            old[rows] = new[: len(rows)]
            getattr(stored, name)[0] = old


def _pieces(aim: Aim) -> Iterator[Piece]:
    """Fillers, which go to page 0, are skipped."""
    count = int((aim.pages > 0).sum())
    rows, positions = aim.rows[:count].tolist(), aim.positions[:count].tolist()
    begins = [False] * count if aim.begins is None else aim.begins[:count].tolist()
    device, single, begin = aim.rows.device, [], 0
    for end in range(1, count + 1):
        if end < count and rows[end] == rows[begin] and positions[end] % BLOCK and not begins[end]:
            continue
        alone = rows[begin] not in (rows[begin - 1 : begin] + rows[end : end + 1])
        if end - begin == 1 and alone and positions[begin]:
            single.append(begin)
        else:
            tokens = torch.arange(begin, end, device=device)[None]
            yield tokens, aim.rows[begin : begin + 1], positions[begin] == 0
        begin = end
    if single:
        places = torch.tensor(single, device=device)
        yield places[:, None], aim.rows[places], False


def keep_states(model: Any, cache: PagedCache) -> RecurrentStates | None:
    """Give the recurrent layers of `model` the states of the cache's rows; None where it has no such layers."""
    config = model.config.get_text_config()
    kinds, states = getattr(config, "layer_types", None) or (), RecurrentStates(cache, config)
    if model.device.type == "cpu" and model.dtype == torch.float32:
        sum_in_float64(model)
    found = False
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if index is None or not index < len(kinds) or kinds[index] not in RECURRENT_LAYERS:
            continue
        taken = set(inspect.signature(module.forward).parameters)
        named = next((name for name in CACHE_NAMES if name in taken), None)
        if named is not None and not any(hasattr(child, "layer_idx") for child in module.children()):
            module.forward = partial(states.layer, module, named, module.forward)
            found = True
    return states if found else None
