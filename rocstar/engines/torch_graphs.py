"""A step of the compact forward on a GPU as one launch: a CUDA graph for each size of step.

A small model runs a few hundred kernels of microseconds each, and Python launches them slower than the GPU runs them.
Steps are padded to a few sizes; a size that comes for the second time is captured, and replayed from then on. The graph
reads its inputs from tensors that stay where they are.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.engines.torch_forward import CompactForward, Forward

SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536)
"""Tokens of a step; larger steps are not padded."""
ONE_AT_A_TIME = threading.Lock()
"""CUDA allows one capture at a time in a process, and engines are threads."""


def filled(count: int) -> int:
    """The size that a step of `count` tokens is padded to."""
    place = bisect_left(SIZES, count)
    return SIZES[place] if place < len(SIZES) else count


def in_graphs(forward: Forward, cache: PagedCache) -> Forward:
    """`forward`, through CUDA graphs where it can be captured."""
    if isinstance(forward, CompactForward) and forward.can_be_captured:
        return GraphedForward(forward, cache)
    return forward


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
