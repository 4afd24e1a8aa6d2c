"""Our own forward over the paged cache, for Qwen2, Qwen3 and Llama shapes: for small models the overhead between
operations of the transformers forward exceeds the operations. It fuses query, key and value projections into one
matrix, and gate and up into another.

On a CPU it stores the matrices in oneDNN's packed order, and the transformers model's own copy is dropped. A plain
product reorders the weights each time, which is expensive in a step with few tokens: without that 64 tokens run 1.2 to
1.5 times as fast, 8 tokens twice as fast. A row of a product has the same bits whatever the other rows hold, from
MIN_ROWS rows up (tests/engines/test_torch_linear.py). With AMX it would not, so there products in bf16 are over a fixed
number of rows: blocks of 64 reach 1,000 GFLOP/s with SmolLM2's matrices, ten times what AVX-512 does, and a block that
holds 8 tokens takes no longer than AVX-512 takes for them.

On a GPU a step is one launch, a CUDA graph for each size of step: a small model runs a few hundred kernels of
microseconds each, and Python launches them slower than the GPU runs them. Steps are padded to a few sizes; a size that
comes for the second time is captured, and replayed from then on. The graph reads its inputs from tensors that stay
where they are.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache, cache_shape
from rocstar.engines.torch_gpus import cpu_has_tiles, cpu_multiplies_bf16
from rocstar.support.processes import give_memory_back

PACKED_FROM = 2**18  # numbers of a matrix in fp32; for smaller ones code that oneDNN compiles by rows costs too much
USUAL_ROWS = 64  # tokens of a step for which oneDNN chooses the order; other values make no measured difference
BLOCK = 64  # rows of a product with AMX
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536)
"""Tokens of a step; larger steps are not padded."""
ONE_AT_A_TIME = threading.Lock()
"""CUDA allows one capture at a time in a process, and engines are threads."""


class CompactForward:
    """Tokens share one axis, [T, hidden], from the embedding to the head."""

    is_recurrent = False

    def __init__(self, model: Any, cache: PagedCache, attention: PagedAttention, positions: int) -> None:
        base = model.model
        self._names = {module: f"{name}.weight" for name, module in model.named_modules()}
        self._embedding, self._norm, self.head = base.embed_tokens, base.norm, Product(model.lm_head)
        with torch.inference_mode():
            everywhere = torch.arange(positions, device=model.device).unsqueeze(0)
            cos, sin = base.rotary_emb(torch.zeros(0, device=model.device), everywhere)  # fp32
        half = cos.shape[-1] // 2
        turns = cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        self._between = (_InTriton if attention.can_be_captured else _InTorch)(cache, *turns)
        parts = (self._between, attention, model.config)
        self._layers = [_Layer(layer, place, *parts) for place, layer in enumerate(base.layers)]
        products = (self.head, *(product for layer in self._layers for product in layer.products))
        self._reordered = [product for product in products if product.reorders]

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(ids_T, sampled_N))

    def body(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        """[N, hidden] of the sampled tokens after all layers."""
        self._between.begin()
        hidden, more = F.embedding(ids_T, self._embedding.weight).float(), None
        for layer in self._layers:
            hidden, more = layer(hidden, more)
        return _normed((hidden if more is None else hidden + more)[sampled_N], self._norm)

    def renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy new weights into the reordered matrices; the others are views of the model's."""
        for product in self._reordered:
            product.renew([self._of(part, weights) for part in product.parts])
            give_memory_back()  # this thread's heap would hold each matrix three times over

    def sleep(self) -> None:
        for product in self._reordered:
            product.weight = torch.empty(0)

    def _of(self, part: Any, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A layer's weight; a tied head's is the embedding's if only that is given."""
        found = weights.get(self._names[part])
        return weights[self._names[self._embedding]] if found is None else found


class _Layer:
    def __init__(self, layer: Any, place: int, between: _InTorch, attend: PagedAttention, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        _, _, self._width = cache_shape(config)
        self._between, self._attend_to_pages = between, attend
        self._place, self._scaling = place, self._width**-0.5
        self._first, self._second = layer.input_layernorm, layer.post_attention_layernorm
        self._project = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_norms = (attention.q_norm, attention.k_norm) if config.model_type == "qwen3" else None
        self._gate_up = Product(mlp.gate_proj, mlp.up_proj)
        self._output, self._down = Product(attention.o_proj), Product(mlp.down_proj)
        self.products = (self._project, self._output, self._gate_up, self._down)

    def __call__(self, hidden: torch.Tensor, more: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream [T, hidden], addend not yet added to it) before the layer -> the same after it."""
        hidden, normed = self._between.add_normed(hidden, more, self._first)
        projected = self._project(normed).view(len(normed), -1, self._width)
        queries = self._between.turn(self._place, projected, self._head_norms)
        mixed = self._attend_to_pages(self._place, queries, self._scaling).flatten(1)
        hidden, normed = self._between.add_normed(hidden, self._output(mixed), self._second)
        return hidden, self._down(self._between.gated(self._gate_up(normed)))


class _InTorch:
    """The operations between matrix products, in plain torch.

    cos, sin: [positions, head_dim], the first half of sin negative."""

    def __init__(self, cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cache, self._tables, self._turns = cache, (cos, sin), (cos, sin)

    def begin(self) -> None:
        """Called once the cache is aimed at the tokens of a step."""
        self._turns = tuple(table[self._cache.aim.positions].unsqueeze(1) for table in self._tables)  # type: ignore[assignment]

    def add_normed(
        self, hidden: torch.Tensor, more: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums with `more`, and their norm."""
        hidden = hidden if more is None else hidden + more
        return hidden, _normed(hidden, norm)

    def turn(self, layer: int, projected: torch.Tensor, norms: Any) -> torch.Tensor:
        """Queries, keys and values, [T, all heads, head_dim] -> rotated queries; the others go to the cache."""
        kv_heads, (cos, sin) = self._cache.keys.shape[2], self._turns
        heads = projected.shape[1] - 2 * kv_heads
        turned, values = projected.tensor_split((heads + kv_heads,), 1)
        turned = turned.float()
        for norm, part in zip(norms or (), turned.tensor_split((heads,), 1), strict=False):
            part.copy_(_normed(part, norm))
        torch.addcmul(turned * cos, turned.roll(projected.shape[2] // 2, -1), sin, out=turned)
        queries, keys = turned.tensor_split((heads,), 1)
        self._cache.write(layer, keys, values)
        return queries

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        """[T, 2 inner], gates and gated values -> [T, inner]."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)


class _InTriton(_InTorch):
    """The same, each as one kernel."""

    def __init__(self, cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__(cache, cos, sin)
        self._kernels = import_module("rocstar.engines.torch_kernels")

    def begin(self) -> None:
        """Nothing to do: kernels look angles up by themselves."""

    def add_normed(
        self, hidden: torch.Tensor, more: torch.Tensor | None, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self._kernels.add_normed(hidden, more, norm, self._cache.keys.dtype)

    def turn(self, layer: int, projected: torch.Tensor, norms: Any) -> torch.Tensor:
        cache = self._cache
        turned: torch.Tensor = self._kernels.turn(
            projected, *self._tables, norms, cache.keys[layer], cache.values[layer], cache.aim
        )
        return turned

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._kernels.gated(both)
        return found


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


# -- products with weights ------------------------------------------------------------------------------------------


class Product:
    """tokens [T, in] -> [T, out]: several linear layers of the same input as one.

    Their weights and biases become views of one tensor, so that writing to the layers writes here. Reordered weights
    leave a layer without data; new ones are passed to `renew`."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.parts = parts
        biases = [part.bias for part in parts]
        self._bias = None if biases[0] is None else _one_of(biases)
        self.weight = _one_of([part.weight for part in parts])
        self._dtype = self.weight.dtype
        self.reorders = packs(self.weight)
        self._in_blocks = needs_blocks(self.weight)
        if self.reorders:
            self.renew([self.weight])
            for part in parts:
                part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """Take the layers' new weights, reordered. The old ones go first, and a matrix alone is not copied: the head is
        a fifth of a small model."""
        first, *others = (weight.detach().to(self._dtype) for weight in weights)
        self.weight = torch.cat((first, *others)) if others else first
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, USUAL_ROWS)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self._dtype)
        return in_blocks(self._times, tokens) if self._in_blocks else self._times(tokens)

    def _times(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.reorders:
            return F.linear(tokens, self.weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(tokens, self.weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether products run over a reordered matrix."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return cpu_multiplies_bf16()
    return weight.dtype is torch.float32 and weight.numel() >= PACKED_FROM


def needs_blocks(weight: torch.Tensor) -> bool:
    """Whether a row of a product with this matrix is rounded by how many rows stand beside it."""
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and cpu_has_tiles()


def in_blocks(product: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """tokens [T, in] -> [T, out], BLOCK rows at a time; rows of zeros fill the last block. Transposed rows round
    otherwise too, so they are copied."""
    blocks = torch.split(F.pad(tokens, (0, 0, 0, -len(tokens) % BLOCK)).contiguous(), BLOCK)
    return torch.cat([product(block) for block in blocks])[: len(tokens)]


def _one_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole


# -- steps as CUDA graphs --------------------------------------------------------------------------------------------


def filled(count: int) -> int:
    """The size that a step of `count` tokens is padded to."""
    place = bisect_left(SIZES, count)
    return SIZES[place] if place < len(SIZES) else count


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    wanted: torch.Tensor
    aim: Aim
    hidden: torch.Tensor
    """The graph's output, computed from the tensors above."""


class GraphedForward:
    """The same function as `forward`."""

    is_recurrent = False

    def __init__(self, forward: CompactForward, cache: PagedCache) -> None:
        self._forward, self._cache = forward, cache
        self._seen: set[tuple[int, ...]] = set()
        self._refused: set[tuple[int, ...]] = set()
        """Sizes whose capture failed, for lack of memory say: they run without a graph."""
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
        aim = self._cache.aim
        size = len(ids_T), len(sampled_N), *aim.tables.shape
        if size not in self._seen or size in self._refused or len(ids_T) > SIZES[-1]:
            self._seen.add(size)
            return self._forward(ids_T, sampled_N)
        if size not in self._captured:
            try:
                self._captured[size] = self._capture(ids_T, sampled_N)
            except RuntimeError:
                self._refused.add(size)
                self._cache.aim = aim
                self._pool = self._pool if self._captured else None
                return self._forward(ids_T, sampled_N)
        captured = self._captured[size]
        inputs = (captured.ids, captured.wanted, *_tensors(captured.aim))
        for own, given in zip(inputs, (ids_T, sampled_N, *_tensors(aim)), strict=True):
            own.copy_(given)
        captured.graph.replay()
        return self._forward.head(captured.hidden)

    def renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: graphs read the weights in place."""
        self._forward.renew(weights)

    def sleep(self) -> None:
        """Drop the graphs, which write to the cache's current memory."""
        self._captured.clear()
        self._pool = None  # torch forgets a pool with its last graph

    def _capture(self, ids_T: torch.Tensor, sampled_N: torch.Tensor) -> _Captured:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        ids, wanted, aim = ids_T.clone(), sampled_N.clone(), Aim(*(each.clone() for each in _tensors(self._cache.aim)))
        self._cache.aim = aim
        graph = torch.cuda.CUDAGraph()
        options = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}  # others compute
        back = torch.cuda.stream(torch.cuda.current_stream())  # a failed capture leaves its own stream current
        with ONE_AT_A_TIME, back, torch.cuda.graph(graph, **options):
            hidden = self._forward.body(ids, wanted)
        return _Captured(graph, ids, wanted, aim, hidden)


def _tensors(aim: Aim) -> tuple[torch.Tensor, ...]:
    return aim.rows, aim.positions, aim.pages, aim.tables
