"""Packing loses, invents and mixes up nothing, stays inside its budget and gives every rank as many passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from rocstar.learning.memory import PassShape
from rocstar.learning.pack import MicroBatch, deal, pack, plan

CPU = torch.device("cpu")
TOKENS = st.lists(st.tuples(st.integers(1, 2), st.booleans(), st.floats(-9, 0, width=32)), min_size=1, max_size=12)


def lengths_of(micro: MicroBatch, counted: Sequence[Sequence[bool]]) -> list[int]:
    """Tokens of each row that are computed, shared ones included."""
    return [max((t for t, yes in enumerate(counted[index]) if yes and t), default=1) for index in micro.indices] or [1]


def documents(micro: MicroBatch, of_tokens: torch.Tensor, counted: Sequence[Sequence[bool]]) -> list[list[int]]:
    """What attention sees of each row, cut out of numbers of the sequence."""
    spread = of_tokens if micro.layout.tokens_S is None else of_tokens[micro.layout.tokens_S]
    widths = [width for count, width in micro.layout.calls for _ in range(count)]
    parts = zip(spread.split(widths), lengths_of(micro, counted), strict=True)
    return [part.tolist()[:length] for part, length in parts]


@given(st.lists(TOKENS, max_size=9), st.integers(1, 40), st.integers(1, 3), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_unpacking_gives_the_rows_back(
    rows: list[list[tuple[int, bool, float]]], budget: int, ranks: int, share: bool, system: bool
) -> None:
    if system:  # all begin with one message
        rows, budget = [[*[(1, False, 0.0)] * 20, *row] for row in rows], 4 * budget
    ids, counted, values = ([[token[part] for token in row] for row in rows] for part in range(3))
    packed = [pack(ids, counted, budget, CPU, share=share, rank=r, ranks=ranks) for r in range(ranks)]  # type: ignore[arg-type]
    micros = [micro for each in packed for micro in each]
    assert len({len(each) for each in packed}) == 1
    assert sorted(index for micro in micros for index in micro.indices) == list(range(len(rows)))
    for micro in micros:
        numbers = micro.pick(values)  # type: ignore[arg-type]
        attended = sum(lengths_of(micro, counted))  # type: ignore[arg-type]
        assert attended <= budget or len(micro.indices) <= 1
        assert share or len(micro.ids_T) == attended
        cut = [documents(micro, of_tokens, counted) for of_tokens in (micro.ids_T, micro.positions_T)]  # type: ignore[arg-type]
        seen = zip(micro.indices, *cut, strict=False)
        place = 0
        for index, tokens, positions in seen:
            assert tokens == ids[index][: len(tokens)]
            assert positions == list(range(len(tokens)))
            mine = [t for t in range(1, len(ids[index])) if counted[index][t]]
            there = slice(place, place + len(mine))
            assert len(tokens) == max(mine, default=1)
            assert micro.positions_T[micro.places_K[there]].tolist() == [t - 1 for t in mine]
            assert micro.targets_K[there].tolist() == [ids[index][t] for t in mine]
            assert numbers[there].tolist() == [values[index][t] for t in mine]
            place += len(mine)
        assert place == len(micro.places_K) == len(set(micro.places_K.tolist()))


def test_rows_are_cut_as_the_worked_example_says() -> None:
    (first, second) = pack([[1] * 5, [2] * 3, [3] * 4], [[True] * 5, [True] * 3, [True] * 4], 6, CPU)
    assert (first.indices, second.indices) == ((1, 2), (0,))
    assert first.ids_T.tolist() == [2, 2, 3, 3, 3]
    assert plan([2, 2, 2, 9], [()] * 4, range(4), lambda computed, attended: computed <= 6) == [(0, 1, 2), (3,)]
    (row,) = pack([[11, 12, 21, 22, 31, 23]], [[False, False, True, True, False, True]], 99, CPU)
    assert (row.places_K.tolist(), row.targets_K.tolist()) == ([1, 2, 4], [21, 22, 23])


def test_siblings_share_what_stands_before_the_first_place_of_their_loss() -> None:
    ids, counted = [[1, 2, 3, 21, 22], [1, 2, 3, 31]], [[False] * 3 + [True] * 2, [False] * 3 + [True]]
    (micro,) = pack(ids, counted, 99, CPU)
    assert micro.indices == (1, 0)
    assert (micro.ids_T.tolist(), micro.positions_T.tolist()) == ([1, 2, 3, 3, 21], [0, 1, 2, 2, 3])
    assert (micro.places_K.tolist(), micro.targets_K.tolist()) == ([2, 3, 4], [31, 21, 22])
    assert documents(micro, micro.ids_T, counted) == [[1, 2, 3], [1, 2, 3, 21]]
    (apart,) = pack(ids, counted, 99, CPU, share=False)
    assert apart.ids_T.tolist() == [1, 2, 3, 1, 2, 3, 21]


def test_what_all_rows_begin_with_is_computed_once_and_siblings_share_their_prompt_behind_it() -> None:
    system = list(range(100, 120))
    rows = [[*system, 1, 2, 31], [*system, 1, 2, 32, 33], [*system, 3, 41]]
    counted = [[False] * 22 + [True] * (len(row) - 22) for row in rows[:2]] + [[False] * 21 + [True]]
    (micro,) = pack(rows, counted, 99, CPU)
    assert micro.indices == (2, 0, 1)
    assert micro.ids_T.tolist() == [*system, 3, 1, 2, 2, 32]
    assert micro.positions_T.tolist() == [*range(20), 20, 20, 21, 21, 22]
    assert documents(micro, micro.ids_T, counted) == [rows[2][:-1], rows[0][:-1], rows[1][:-1]]
    assert micro.targets_K.tolist() == [41, 31, 32, 33]


def test_siblings_stay_together_whatever_their_lengths() -> None:
    families = [(1,), (2,), (2,), (1,)]
    assert plan([5, 2, 6, 3], families, range(4), lambda computed, attended: attended <= 9) == [(3, 0), (1, 2)]


SHAPE = PassShape(parameters=10, hidden=512, layers=8, queries=512, keys=128, inner=2048, normed=True)
FAMILY = st.tuples(st.integers(0, 200), st.lists(st.integers(1, 3000), min_size=1, max_size=6))


@given(st.lists(FAMILY, min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_a_pass_on_a_cpu_leaves_no_more_than_it_may(families: list[tuple[int, list[int]]]) -> None:
    ids = [[number] * (prompt + own) for number, (prompt, owns) in enumerate(families) for own in owns]
    counted = [[t >= prompt for t in range(prompt + own)] for prompt, owns in families for own in owns]
    passes = pack(ids, counted, 10**9, CPU, on_cpu=SHAPE)
    assert sorted(index for micro in passes for index in micro.indices) == list(range(len(ids)))
    for micro in passes:
        computed, attended = len(micro.ids_T), sum(lengths_of(micro, counted))
        assert SHAPE.fits(computed, attended) or len(micro.indices) == 1
        assert SHAPE.left(computed, attended) <= SHAPE.largest(10**9, max(map(len, ids)))
    assert len(pack(ids, counted, 10**9, CPU)) == 1


def test_small_models_have_the_passes_they_had() -> None:
    quickstart = PassShape(parameters=340_000, hidden=96, layers=3, queries=96, keys=32, inner=256, normed=True)
    assert quickstart.fits(4096, 4096) and not quickstart.fits(1, 4097)


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    hands = deal([9, 1, 5, 4, 3, 8], 2)
    assert sorted(index for hand in hands for index in hand) == list(range(6))
    assert [sum([9, 1, 5, 4, 3, 8][i] for i in hand) for hand in hands] == [16, 14] or hands == [[0, 3, 1], [5, 2, 4]]
    assert deal([7], 3) == [[0], [], []]
