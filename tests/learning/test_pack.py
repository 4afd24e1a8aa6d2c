"""Packing loses, invents and mixes up nothing, and stays inside its budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from rocstar.learning.pack import pack, plan, spread
from rocstar.types import BatchRow

CPU = torch.device("cpu")
TOKENS = st.lists(st.tuples(st.integers(1, 99), st.booleans(), st.floats(-9, 0, width=32)), min_size=1, max_size=12)


def row(tokens: list[tuple[int, bool, float]]) -> BatchRow:
    ids, mask, values = zip(*tokens, strict=True)
    return BatchRow(token_ids=ids, loss_mask=mask, sampled_logprobs=values, advantage=1.0)


@given(st.lists(TOKENS.map(row), max_size=9), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_the_rows_back(rows: list[BatchRow], budget: int) -> None:
    micros = pack(rows, budget, CPU)
    assert sorted(index for micro in micros for index in micro.indices) == list(range(len(rows)))
    for micro in micros:
        values = spread([r.sampled_logprobs for r in rows], micro)
        assert micro.ids_NT.numel() <= budget or len(micro.indices) == 1
        for place, index in enumerate(micro.indices):
            length, source = len(rows[index].token_ids), rows[index]
            assert micro.ids_NT[place, :length].tolist() == list(source.token_ids)
            assert micro.mask_NT[place, : length - 1].tolist() == [float(m) for m in source.loss_mask[1:]]
            assert values[place, : length - 1].tolist() == list(source.sampled_logprobs[1:])
            assert micro.real_NT[place].tolist() == [float(t < length - 1) for t in range(micro.real_NT.shape[1])]
            assert not micro.ids_NT[place, length:].any()
            assert not micro.mask_NT[place, length - 1 :].any() and not values[place, length - 1 :].any()


def test_rows_are_cut_as_the_worked_example_says() -> None:
    assert plan([4, 2, 3], 6) == [(1, 2), (0,)]
    assert plan([2, 2, 2, 9], 6) == [(0, 1, 2), (3,)]
    assert plan([], 6) == []
