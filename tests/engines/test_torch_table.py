"""Who sits in which row: those that decode in front, the paused ones kept for their session while there is room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from rocstar.engines.torch_cache import SlotCache
from rocstar.engines.torch_rows import Work
from rocstar.engines.torch_table import RowTable
from rocstar.types import Sampling
from tests.engines.models import qwen

ROWS, POSITIONS = 3, 16


@pytest.fixture
def cache() -> SlotCache:
    return SlotCache(qwen(), ROWS, POSITIONS)


@pytest.fixture
def table(cache: SlotCache) -> RowTable:
    return RowTable(cache, ROWS, POSITIONS)


def work(session: str, tokens: Sequence[int] = (1, 2, 3), request: str = "") -> Work:
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(7,))
    return Work(request_id=request or session, session_id=session, token_ids=tuple(tokens), sampling=sampling)


def place(table: RowTable, *sessions: str, clock: int = 0) -> list[bool]:
    return [table.place(work(session), clock=clock) for session in sessions]


def finish(table: RowTable, session: str, clock: int) -> None:
    index = table.running(session)
    assert index is not None
    table.pause(index, clock=clock)
    table.pause_finished()


def decoding(table: RowTable) -> list[str]:
    return [table.at_work(index)[1].session_id for index in range(table.active)]


def test_all_rows_are_given_out_and_no_more(table: RowTable) -> None:
    assert place(table, "a", "b", "c", "d") == [True, True, True, False]
    assert decoding(table) == ["a", "b", "c"]


def test_whoever_ends_leaves_the_front_with_numbers_and_cache(table: RowTable, cache: SlotCache) -> None:
    place(table, "a", "b", "c")
    for index, mark in enumerate((10, 20, 30)):
        table.columns.cached[index] = 2
        table.columns.ids[index, :2] = mark
        cache.keys[:, index] = cache.values[:, index] = mark
    finish(table, "a", clock=1)
    assert sorted(decoding(table)) == ["b", "c"]
    for index in range(ROWS):
        row = table.rows[index]
        assert row is not None
        mark = {"a": 10, "b": 20, "c": 30}[row.session_id]
        assert table.columns.ids[index, :2].tolist() == [mark, mark]
        assert (cache.keys[:, index, ..., :2] == mark).all()
        assert (cache.values[:, index, :, :2] == mark).all()


def test_a_paused_session_goes_on_where_its_cache_ends(table: RowTable) -> None:
    place(table, "a")
    table.columns.cached[0] = 2
    finish(table, "a", clock=1)
    assert table.place(work("a", (1, 2, 3, 4, 5)), clock=2)
    assert table.columns.cached[0] == 2
    finish(table, "a", clock=3)
    assert table.place(work("a", (1, 9, 3, 4, 5)), clock=4)
    assert table.columns.cached[0] == 0, "other tokens than those it holds: nothing of it can be used"


def test_a_newcomer_takes_no_row_from_a_paused_session(table: RowTable) -> None:
    place(table, "a", "b", "c")
    for clock, session in enumerate("bca", start=1):
        finish(table, session, clock)
    assert place(table, "d", clock=4) == [False]
    assert place(table, "a", clock=4) == [True]


def test_the_row_paused_longest_is_given_up_first(table: RowTable) -> None:
    place(table, "a", "b", "c")
    for clock, session in enumerate("bca", start=1):
        finish(table, session, clock)
    table.evict()
    assert place(table, "d", clock=4) == [True]
    assert {row.session_id for row in table.rows if row} == {"a", "c", "d"}


def test_a_second_request_of_a_session_that_decodes_stands_behind_the_first(table: RowTable) -> None:
    place(table, "a")
    assert table.place(work("a", request="second"), clock=0)
    assert (table.active, [w.request_id for w in table.works]) == (1, ["a", "second"])


def test_closing_a_session_gives_its_requests_back(table: RowTable) -> None:
    place(table, "a", "b")
    table.place(work("a", request="second"), clock=0)
    assert [closed.request_id for closed in table.close("a")] == ["a", "second"]
    assert (decoding(table), table.close("a"), table.running("a")) == (["b"], [], None)


def test_clearing_gives_back_what_ran_and_frees_every_row(table: RowTable) -> None:
    place(table, "a", "b", "c")
    finish(table, "b", clock=1)
    table.columns.cached[:] = 2
    assert sorted(cleared.request_id for cleared in table.clear()) == ["a", "c"]
    assert (table.active, table.used_tokens) == (0, 0)
    assert place(table, "d", "e", "f") == [True] * 3
