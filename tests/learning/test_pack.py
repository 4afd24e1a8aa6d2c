"""Packing loses, invents and mixes up nothing, stays inside its budget and gives every rank as many passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from rocstar.learning.pack import deal, pack, pick, plan

CPU = torch.device("cpu")
TOKENS = st.lists(st.tuples(st.integers(1, 99), st.booleans(), st.floats(-9, 0, width=32)), min_size=1, max_size=12)


@given(st.lists(TOKENS, max_size=9), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_the_rows_back(rows: list[list[tuple[int, bool, float]]], budget: int, ranks: int) -> None:
    ids, counted, values = ([[token[part] for token in row] for row in rows] for part in range(3))
    packed = [pack(ids, counted, budget, CPU, rank=rank, ranks=ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    micros = [micro for each in packed for micro in each]
    assert len({len(each) for each in packed}) == 1
    assert sorted(index for micro in micros for index in micro.indices) == list(range(len(rows)))
    for micro in micros:
        numbers = pick(values, counted, micro)  # type: ignore[arg-type]
        begin = place = 0
        assert sum(micro.lengths) <= budget or len(micro.indices) <= 1
        for index, length, count in zip(micro.indices, micro.lengths, micro.counts, strict=False):
            assert micro.ids_T[begin : begin + length].tolist() == ids[index]
            assert micro.positions_T[begin : begin + length].tolist() == list(range(length))
            mine, there = [t for t in range(1, length) if counted[index][t]], slice(place, place + count)
            assert (micro.places_K[there] - begin).tolist() == [t - 1 for t in mine]
            assert micro.targets_K[there].tolist() == [ids[index][t] for t in mine]
            assert numbers[there].tolist() == [values[index][t] for t in mine]
            begin, place = begin + length, place + count
        assert place == len(micro.places_K)


def test_rows_are_cut_as_the_worked_example_says() -> None:
    (first, second) = pack([[1] * 4, [2] * 2, [3] * 3], [[True] * 4, [True] * 2, [True] * 3], 6, CPU)
    assert (first.indices, second.indices) == ((1, 2), (0,))
    assert plan([2, 2, 2, 9], range(4), 6) == [(0, 1, 2), (3,)]
    (row,) = pack([[11, 12, 21, 22, 31, 23]], [[False, False, True, True, False, True]], 99, CPU)
    assert (row.places_K.tolist(), row.targets_K.tolist()) == ([1, 2, 4], [21, 22, 23])


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    hands = deal([9, 1, 5, 4, 3, 8], 2)
    assert sorted(index for hand in hands for index in hand) == list(range(6))
    assert [sum([9, 1, 5, 4, 3, 8][i] for i in hand) for hand in hands] == [16, 14] or hands == [[0, 3, 1], [5, 2, 4]]
    assert deal([7], 3) == [[0], [], []]
