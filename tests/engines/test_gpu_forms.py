"""What the torch engine does on a GPU, as far as a CPU can show it: kernels by Triton's interpreter, and when a step is
captured. On a GPU scripts/gpu_check runs the real thing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import torch_compact
from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.engines.torch_compact import SIZES, CompactForward, GraphedForward, filled
from rocstar.engines.torch_forward import forward_of
from tests.engines.models import llama

INTERPRETED = """
import sys
import torch
from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache
from rocstar.engines.torch_compact import CompactForward
from rocstar.engines.torch_kernels import attend
from tests.engines.models import llama, qwen


@torch.inference_mode()
def ran(make, triton):
    model = make()
    cache = PagedCache(model, 6)
    attention = PagedAttention(cache)
    attention._on_gpu = attend if triton else None
    forward = CompactForward(model, cache, attention, 64)
    tables = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    found = []
    for rows, places in (([0] * 5 + [1] * 20, [*range(5), *range(20)]), ([0, 1], [5, 20])):
        rows, places = torch.tensor(rows), torch.tensor(places)
        cache.aim = Aim(rows, places, tables[rows, places // 16].long(), tables)
        found.append(forward(7 * places % 61, torch.arange(len(rows))))
    return torch.cat(found), cache.keys, cache.values


for make in (llama, qwen):
    print(max(float((a - b).abs().max()) for a, b in zip(ran(make, True), ran(make, False), strict=True)))
"""


def test_kernels_interpreted_by_the_triton_of_vllm_give_what_torch_gives() -> None:
    python, here = os.environ.get("ROCSTAR_VLLM_PYTHON"), Path(__file__).parents[2]
    if not python:
        pytest.skip("no Triton: ROCSTAR_VLLM_PYTHON names no environment with vLLM, which has it")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here)}
    done = subprocess.run([python, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert all(float(gap) < 2e-5 for gap in done.stdout.split()), done.stdout


def test_a_step_is_filled_up_to_the_next_size() -> None:
    assert [filled(count) for count in (1, 4, 5, 64, 65)] == [4, 4, 8, 64, 96]
    assert filled(SIZES[-1] + 1) == SIZES[-1] + 1


class Recorded:
    """Stands in for a CUDA graph: computes anew from the tensors that it was captured over."""

    def __init__(self, forward: CompactForward, captured: Any) -> None:
        self._forward, self._captured = forward, captured

    def replay(self) -> None:
        self._forward._between._cache.aim = self._captured.aim
        self._captured.hidden.copy_(self._forward.body(self._captured.ids, self._captured.wanted))


def test_a_size_is_captured_when_it_comes_again_or_the_cache_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pools = llama(), []
    cache = PagedCache(model, 4)
    forward = forward_of(model, cache, 64)
    assert isinstance(forward, CompactForward)

    def capture(graphed: GraphedForward, ids: torch.Tensor, wanted: torch.Tensor) -> Any:
        pools.append(graphed._pool)
        graphed._pool = graphed._pool or object()
        aim = Aim(*(each.clone() for each in torch_compact._tensors(cache.aim)))
        captured = torch_compact._Captured(None, ids.clone(), wanted.clone(), aim, torch.empty(4, 64))  # type: ignore[arg-type]
        object.__setattr__(captured, "graph", Recorded(forward, captured))
        return captured

    monkeypatch.setattr(GraphedForward, "_capture", capture)
    graphed, tables = GraphedForward(forward, cache), torch.tensor([[1, 2]], dtype=torch.int32)

    @torch.inference_mode()
    def step(forward: Any, first: int) -> torch.Tensor:
        places = torch.arange(first, first + 4)
        cache.aim = Aim(places * 0, places, places * 0 + 1, tables)
        return forward(5 * places % 61, torch.arange(4)).clone()

    found = [step(graphed, 4 * turn) for turn in range(3)]
    assert len(pools) == 1, "the first comes as it is, the second is captured, the third replayed"
    graphed.sleep()
    cache.keys, cache.values = cache.keys.clone(), cache.values.clone()  # awake elsewhere
    found.append(step(graphed, 12))
    assert pools == [None, None], "torch forgets a pool with its last graph"
    fresh = PagedCache(model, 4)
    cache.keys, cache.values = fresh.keys, fresh.values
    assert torch.equal(torch.stack(found), torch.stack([step(forward, 4 * turn) for turn in range(4)]))


def test_a_size_that_cannot_be_captured_is_computed_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tried = PagedCache(llama(), 4), []

    def fail(graphed: GraphedForward, ids: torch.Tensor, wanted: torch.Tensor) -> Any:
        tried.append(len(ids))
        cache.aim = None  # type: ignore[assignment]
        raise torch.OutOfMemoryError("CUDA out of memory")

    forward = forward_of(llama(), cache, 64)
    assert isinstance(forward, CompactForward)
    monkeypatch.setattr(GraphedForward, "_capture", fail)
    graphed, places = GraphedForward(forward, cache), torch.arange(4)
    with torch.inference_mode():
        for _ in range(3):
            cache.aim = Aim(places * 0, places, places * 0 + 1, torch.tensor([[1]], dtype=torch.int32))
            assert torch.equal(graphed(places, places), forward(places, places))
    assert tried == [4]
