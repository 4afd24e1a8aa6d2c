"""How much of each source a mix takes, and which rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.data.sft.mix import chosen, shares, smaller

IDS = [f"{n:04x}" for n in range(200)]


@pytest.mark.parametrize(
    ("available", "weights", "rows", "expected"),
    [
        ({"a": 7, "b": 3, "c": 0}, {}, None, {"a": 7, "b": 3, "c": 0}),  # without weights, every row
        ({"a": 60, "b": 30, "c": 10}, {}, 10, {"a": 6, "b": 3, "c": 1}),  # or in the ratio of the sizes
        ({"a": 300, "b": 100}, {"a": 3, "b": 1}, None, {"a": 300, "b": 100}),  # else the scarcest sets the size
        ({"a": 30, "b": 1000}, {"a": 0.1, "b": 0.2}, None, {"a": 30, "b": 60}),
    ],
)
def test_a_mix_takes_what_weights_sizes_and_the_number_of_rows_say(
    available: dict[str, int], weights: dict[str, float], rows: int | None, expected: dict[str, int]
) -> None:
    assert {name: share.taken for name, share in shares(available, weights, rows).items()} == expected


def test_a_source_that_runs_dry_gives_what_it_has_and_nobody_fills_the_gap() -> None:
    made = shares({"a": 1000, "b": 40}, {"a": 1, "b": 1}, 200)
    assert (made["a"].taken, made["a"].short) == (100, 0)
    assert (made["b"].wanted, made["b"].taken, made["b"].short) == (100, 40, 60)


def test_what_makes_a_mix_smaller_is_said() -> None:
    both = {"a": 1000, "b": 40}, {"a": 1.0, "b": 1.0}
    assert smaller(shares(*both, 200), 200) == [
        "b ran dry: 60 rows fewer than its weight asks for, which are not replaced",
        "the mix has 140 of the 200 rows that mix.rows asks for, in another ratio than the weights'",
    ]
    assert smaller(shares(*both, None), None) == [
        "b sets the size of the mix, 80 rows, by its weight; 960 of others are left over"
    ]
    assert smaller(shares(*both, 80), 80) == smaller(shares(both[0], {}, None), None) == []


@given(
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 100), min_size=5, max_size=5),
    rows=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_shares_add_up_and_never_take_more_than_there_is(
    sizes: list[int], weights: list[float], rows: int | None
) -> None:
    available = {str(n): size for n, size in enumerate(sizes)}
    parts = {str(n): weights[n] for n in range(len(sizes))}
    made = shares(available, parts, rows)
    assert all(0 <= share.taken <= share.available for share in made.values())
    if rows is not None:
        assert sum(share.wanted for share in made.values()) == rows
    else:
        assert all(share.short <= 1 for share in made.values())  # rounding to whole rows, nothing more
    whole, total = sum(parts.values()), sum(share.wanted for share in made.values())
    assert all(abs(share.wanted - total * parts[name] / whole) < 1 + 1e-6 for name, share in made.items())


def test_a_draw_is_without_replacement_and_grows_by_adding() -> None:
    few, more = chosen(IDS, 20, seed=1), chosen(IDS, 50, seed=1)
    assert len(set(few)) == 20 and set(few) < set(more)
    assert chosen(IDS, 20, seed=1) == few != chosen(IDS, 20, seed=2)
    assert chosen(IDS, 999, seed=1) == list(range(200))


def test_a_rows_place_in_the_draw_depends_on_itself_alone() -> None:
    by_id = {IDS[n] for n in chosen(IDS, 20, seed=1)}
    turned = list(reversed(IDS))
    assert {turned[n] for n in chosen(turned, 20, seed=1)} == by_id
