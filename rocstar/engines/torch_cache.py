"""The KV cache of the torch engine: pages of keys and values, their memory, and attention over them.

Any transformers causal LM that takes its attention from the library's registry runs on this cache unchanged: it
projects and rotates, hands new keys and values to `PagedCache.update`, and calls `_attend_in_library`, which is
registered there as an attention function.

Every token's result is independent of the other tokens in the batch, bit for bit on CPU (tests/engines/
test_invariance.py). The compiled form (`_attention.c`) computes each token by itself. The torch form, for GPUs and
where nothing could be compiled, relies on two properties of matrix products: one summation order from MIN_QUERIES rows
up and for at most PIECE terms a sum, and exact zeros from masked positions. On AVX-512 machines that needs MKL's strict
mode, set before torch loads (`rocstar.support.threads`); so do the products outside attention. This holds for models
whose head and MLP widths are multiples of 32; element-wise kernels treat the remainder differently.
"""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from transformers import AttentionInterface

from rocstar.engines.pages import PAGE, cache_bytes, refuse_too_many_tokens
from rocstar.errors import ConfigError, first_line
from rocstar.sandbox.container import host_bytes
from rocstar.support.layers import ENGINE_LAYERS

NAME = "rocstar"
MIN_QUERIES = 4  # rows; CPU matrix products take another summation order below it
PIECE = 128  # positions summed in one product; longer sums are blocked by their length, which depends on neighbours


@dataclass(frozen=True, slots=True)
class Aim:
    """The T tokens of one forward pass, those of one sequence side by side and in order."""

    rows: torch.Tensor
    """[T] int64: row of `tables` for each token."""
    positions: torch.Tensor
    """[T] int64: its position in its sequence; it attends to all up to that."""
    pages: torch.Tensor
    """[T] int64: page that its key and value go to."""
    tables: torch.Tensor
    """[rows, pages] int32: the pages of each sequence, in order."""
    begins: torch.Tensor | None = None
    """[T] bool: where a recurrent layer begins a new sum; None: where a sequence begins."""


class PagedCache:
    """`keys` [layers, pages + 1, kv_heads, head_dim, PAGE] and `values` [..., PAGE, head_dim]; page 0 is scratch.

    Keys lie transposed: the scores of a page's positions are then computed side by side. The caller sets `aim` before
    each forward pass. Main memory is allocated page by page as they are written, until `release`. Stands in for a
    transformers cache where a model's own forward runs."""

    is_compileable = False

    def __init__(self, model: Any, pages: int) -> None:
        layers, heads, width = cache_shape(model.config)
        self._maps: list[mmap.mmap] = []
        self._shapes = (layers, pages + 1, heads, width, PAGE), (layers, pages + 1, heads, PAGE, width)
        self.keys, self.values = (self._zeros(shape, model.dtype, model.device) for shape in self._shapes)
        self.aim: Aim

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of the new tokens, each [T, kv_heads, head_dim]."""
        pages, offsets = self.aim.pages, self.aim.positions % PAGE
        self.keys[layer][pages, :, :, offsets] = keys.to(self.keys.dtype)
        self.values[layer][pages, :, offsets] = values.to(self.values.dtype)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *unused: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer of transformers with [1, kv_heads, T, head_dim]."""
        self.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        """transformers calls it; positions are always given explicitly, so nothing depends on it."""
        return 0

    def copy_page(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def release(self) -> None:
        """Return main memory to the system; no page may be held. The memory is zero when it is used again."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

    def sleep(self) -> None:
        """Also free the GPU's memory, until `wake`."""
        self.release()
        if not self._maps:
            self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if not self.keys.numel():
            self.keys, self.values = (self._zeros(each, self.keys.dtype, self.keys.device) for each in self._shapes)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """On a CPU mapped from the system: torch.zeros would write to all of it and so allocate it at once."""
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        self._maps.append(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return torch.frombuffer(self._maps[-1], dtype=dtype).view(shape)

    def clear(self, pages: list[int] | None = None) -> None:
        """Zero these pages, or all: masked positions are multiplied by zero, which does not remove numbers that are not
        finite."""
        if not self.keys.numel():  # asleep
            return
        if pages is None and self._maps:
            self.release()
        else:
            self.keys[:, slice(None) if pages is None else pages] = 0
            self.values[:, slice(None) if pages is None else pages] = 0


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key heads and width of a head of a transformers config. Raises ConfigError where layers differ."""
    text = config.get_text_config()
    try:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except Exception as error:  # raised by transformers if layers differ
        kind = f"the torch engine cannot run a model of type {config.model_type}"
        raise ConfigError(f"{kind}: {str(error).partition('. ')[0]}") from error
    return text.num_hidden_layers, heads, width


# -- memory --------------------------------------------------------------------------------------------------------


def refuse_what_does_not_fit(model: Any, tokens: int) -> None:
    """Raises ConfigError when the cache would take more than there is on the model's device."""
    needed = cache_bytes(cache_shape(model.config), tokens, model.dtype.itemsize)
    there = torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else host_bytes()
    refuse_too_many_tokens(needed, there, tokens)


# -- attention -----------------------------------------------------------------------------------------------------


class PagedAttention:
    """(layer, query [T, heads, head_dim], scaling, window) -> [T, heads, head_dim], over the tokens that `cache.aim`
    names; window: how many positions each attends to, its own the last of them; 0 for all."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        keys = cache.keys
        fits = keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16) and keys.shape[3] % PAGE == 0
        self._compiled = _compiled() if fits else None
        self._on_gpu = _on_gpu(cache) if cache.keys.is_cuda else None

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can capture it: it reads no number back from the GPU."""
        return self._on_gpu is not None

    def __call__(self, layer: int, query: torch.Tensor, scaling: float, window: int = 0) -> torch.Tensor:
        aim, keys, values = self._cache.aim, self._cache.keys[layer], self._cache.values[layer]
        query = query.to(keys.dtype)
        if self._on_gpu is not None:
            found: torch.Tensor = self._on_gpu(query, keys, values, aim, scaling, window)
            return found
        if self._compiled is None:
            return _gathered(query, keys, values, aim, scaling, window)
        tokens, heads, width = query.shape
        if query.stride()[1:] != (width, 1):
            query = query.contiguous()
        mixed = torch.empty((tokens, heads, width), dtype=query.dtype)
        self._compiled.attend(
            query.dtype is torch.bfloat16,
            *(each.data_ptr() for each in (query, keys, values, mixed, aim.tables, aim.rows, aim.positions)),
            aim.tables.shape[1],
            tokens,
            query.stride(0),
            heads,
            keys.shape[1],
            width,
            window,
            scaling,
        )
        return mixed


def _compiled() -> Any:
    try:
        return import_module("rocstar.engines._attention")
    except ImportError:
        return None


def _on_gpu(cache: PagedCache) -> Any:
    """The Triton kernel, if it runs over this cache: Triton needs a C compiler, and some GPUs have too little shared
    memory for wide heads in fp32."""
    keys = cache.keys[0]
    none = torch.zeros(1, dtype=torch.int64, device=keys.device)
    query = torch.zeros((1, keys.shape[1], keys.shape[2]), dtype=keys.dtype, device=keys.device)
    try:
        attend = import_module("rocstar.engines.torch_kernels").attend
        attend(query, keys, cache.values[0], Aim(none, none, none, none[None].int()), 1.0, 0)
    except Exception as error:  # the compiler or the driver may raise anything
        warnings.warn(
            f"the torch engine decodes several times slower: Triton fails here ({first_line(error)})", stacklevel=2
        )
        return None
    return attend


def _gathered(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, aim: Aim, scaling: float, window: int
) -> torch.Tensor:
    """The same in torch, over copies of the pages: sequences with one new token in one call, the others one by one."""
    mixed = torch.empty_like(query)
    counts = torch.unique_consecutive(aim.rows, return_counts=True)[1]
    ends = counts.cumsum(0)
    single = counts == 1
    parts = [ends[single, None] - 1] if bool(single.any()) else []
    many = zip(ends[~single].tolist(), counts[~single].tolist(), strict=True)
    parts += [torch.arange(end - count, end, device=query.device)[None] for end, count in many]
    for tokens_NT in parts:
        positions_NT = aim.positions[tokens_NT]
        pages = int(positions_NT.max()) // PAGE + 1
        table = aim.tables[aim.rows[tokens_NT[:, 0]], :pages].long()
        key, value = keys[table].permute(0, 2, 3, 1, 4).flatten(3), values[table].transpose(1, 2).flatten(2, 3)
        mixed[tokens_NT] = _attend(query[tokens_NT].transpose(1, 2), key, value, positions_NT, scaling, window)
    return mixed


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions_NT: torch.Tensor, scaling: float, window: int
) -> torch.Tensor:
    """query [N, H, T, D], key [N, K, D, L], value [N, K, L, D] -> [N, T, H, D]. Grouped heads are folded into the query
    axis, so keys are never repeated."""
    rows, heads, steps, width = query.shape
    kv_heads, length = key.shape[1], key.shape[3]
    count = heads // kv_heads * steps
    folded = _at_least(MIN_QUERIES, (query * scaling).reshape(rows, kv_heads, count, width))
    scores = torch.matmul(folded, key)[:, :, :count].view(rows, kv_heads, -1, steps, length)
    places, own = torch.arange(length, device=key.device), positions_NT.unsqueeze(-1)
    unseen = (places > own) | (places <= own - (window or length))
    scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = _mix(_at_least(MIN_QUERIES, weights.reshape(rows, kv_heads, count, -1)), value)[:, :, :count]
    return mixed.reshape(rows, heads, steps, width).transpose(1, 2)


def _at_least(count: int, queries: torch.Tensor) -> torch.Tensor:
    """[B, K, Q, D] with rows of zeros added where Q is below `count`."""
    lacking = count - queries.shape[2]
    return torch.nn.functional.pad(queries, (0, 0, 0, lacking)) if lacking > 0 else queries


def _mix(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """weights [B, K, Q, L] times value [B, K, L, D], PIECE positions at a time."""
    pieces = zip(torch.split(weights, PIECE, 3), torch.split(value, PIECE, 2), strict=True)
    first, *others = (torch.matmul(w, v) for w, v in pieces)
    for other in others:
        first += other
    return first


def use_paged_attention(model: Any, attention: PagedAttention) -> None:
    """Make `model` attend through `attention`. Raises ConfigError for layers that attend to anything but all positions
    or a window of the last ones, or that keep another kind of state."""
    if other := sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - ENGINE_LAYERS):
        raise ConfigError(f"it has layers of kind {', '.join(other)}; take an [[engine]] of kind 'vllm'")
    AttentionInterface.register(NAME, _attend_in_library)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.rocstar_attention = attention


def _attend_in_library(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, head_dim] -> [1, T, heads, head_dim]; keys and values are in the cache already."""
    attend = module.rocstar_attention
    scaling = scaling or query.shape[-1] ** -0.5  # as transformers' own functions have it
    return attend(module.layer_idx, query[0].transpose(0, 1), scaling, sliding_window or 0).unsqueeze(0), None
