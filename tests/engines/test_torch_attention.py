"""Attention over pages, compiled and in torch, against the plain formula over whole sequences."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import torch_cache
from rocstar.engines.pages import PAGE
from rocstar.engines.torch_cache import Aim, PagedAttention, PagedCache
from tests.engines.models import llama

LLAMA = llama()
LENGTHS = (1, PAGE, PAGE + 1, 200)  # of the sequences; the last feeds its last 40 tokens at once


class Sequences:
    """Keys and values of sequences whose pages lie in any order; what no sequence holds is not a number."""

    def __init__(self, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(kv_heads, n, width, generator=draw).to(dtype) for n in LENGTHS]
        self.values = [torch.randn(kv_heads, n, width, generator=draw).to(dtype) for n in LENGTHS]
        needed = [-(-n // PAGE) for n in LENGTHS]
        numbers = (torch.randperm(sum(needed), generator=draw) + 1).split(needed)
        self.tables = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int32)
        self.cache = PagedCache(LLAMA, 1)
        self.cache.keys = torch.full((1, sum(needed) + 1, kv_heads, width, PAGE), torch.nan, dtype=dtype)
        self.cache.values = torch.full((1, sum(needed) + 1, kv_heads, PAGE, width), torch.nan, dtype=dtype)
        for row, pages in enumerate(numbers):
            self.tables[row, : len(pages)] = pages
            for place in range(LENGTHS[row]):
                self.cache.keys[0, pages[place // PAGE], :, :, place % PAGE] = self.keys[row][:, place]
                self.cache.values[0, pages[place // PAGE], :, place % PAGE] = self.values[row][:, place]
        rows = [0, 1, 2, *[3] * 40]
        places = [0, PAGE - 1, PAGE, *range(160, 200)]
        self.rows, self.places = torch.tensor(rows), torch.tensor(places)
        self.query = torch.randn(len(rows), heads, width, generator=draw).to(dtype)

    def attended(self, chosen: slice = slice(None), window: int = 0) -> torch.Tensor:
        pages = torch.zeros_like(self.rows)
        self.cache.aim = Aim(self.rows[chosen], self.places[chosen], pages[chosen], self.tables)
        return PagedAttention(self.cache)(0, self.query[chosen], 0.3, window)

    def plain(self, window: int = 0) -> torch.Tensor:
        out = []
        for row, place, query in zip(self.rows, self.places, self.query, strict=True):
            groups = len(query) // len(self.keys[row])
            seen = slice(max(0, int(place) + 1 - window) if window else 0, int(place) + 1)
            key = self.keys[row][:, seen].repeat_interleave(groups, 0).double()
            value = self.values[row][:, seen].repeat_interleave(groups, 0).double()
            weights = torch.softmax(0.3 * (key @ query.double().unsqueeze(2)).squeeze(2), -1)
            out.append((weights.unsqueeze(1) @ value).squeeze(1))
        return torch.stack(out)


@pytest.fixture(params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(torch_cache, "_compiled", lambda: None)
    elif torch_cache._compiled() is None:
        pytest.skip("the attention was not compiled")
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (6, 2, 32), (3, 3, 16), (8, 1, 128), (2, 2, 24)])
def test_both_forms_give_what_the_formula_gives(
    form: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> None:
    sequences = Sequences(heads, kv_heads, width, dtype)
    if form == "torch" or width % PAGE:  # it multiplies what is masked by zero
        sequences.cache.keys.nan_to_num_()
        sequences.cache.values.nan_to_num_()
    tolerance = 5e-6 if dtype is torch.float32 else 5e-2
    for window in (0, 1, 16, 37, 500):
        found, expected = sequences.attended(window=window).double(), sequences.plain(window)
        assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance), window


def test_compiled_each_token_is_computed_by_itself(form: str) -> None:
    if form == "torch":
        pytest.skip("in torch it is so in batches of the engine's, tests/engines/test_invariance.py")
    sequences = Sequences(4, 2, 64, torch.float32)
    together = sequences.attended()
    alone = [sequences.attended(slice(place, place + 1)) for place in range(len(together))]
    assert torch.equal(together, torch.cat(alone))


def test_scores_far_apart_stay_finite(form: str) -> None:
    sequences = Sequences(4, 2, 64, torch.float32)
    sequences.cache.keys.nan_to_num_()
    sequences.cache.values.nan_to_num_()
    sequences.query *= 1e4
    attended = sequences.attended()
    assert torch.isfinite(attended).all()
    sequences.query = sequences.query.double()
    assert torch.allclose(attended.double(), sequences.plain(), atol=1e-3)
