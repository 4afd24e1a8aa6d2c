"""Pages of the cache: shared by sequences that open alike, kept while a tool runs, given up by the newest when short.

The arithmetic is left out: a pass only notes which token each position holds, so that the cache can be read back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from rocstar.engines.pages import PAGE, PagePool, names_of
from rocstar.engines.torch_table import Sequence, SequenceTable, Work
from rocstar.types import Sampling

POSITIONS = 6 * PAGE
LONG = tuple(range(2 * PAGE + 5))


class Notes:
    """A cache that holds the token of each position of each page."""

    def __init__(self, pages: int) -> None:
        self.tokens = np.full((pages + 1, PAGE), -1)

    def copy_page(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]


class Table:
    """A table whose sequences write 100, 101, 102, ..."""

    def __init__(self, *, rows: int = 4, pages: int = 24) -> None:
        self.cache, self.pages = Notes(pages), PagePool(pages)
        self.table = SequenceTable(self.cache.copy_page, self.pages, rows=rows, positions=POSITIONS, recurrent=False)
        self.fed = 0

    def ask(self, session: str, tokens: Many[int] = LONG, new: int = 4, request: str = "") -> None:
        work = Work(
            request_id=request or session,
            session_id=session,
            token_ids=tuple(tokens),
            sampling=Sampling(max_new_tokens=new),
        )
        self.table.submit(work)
        self.table.admit()

    def step(self, prefill: int = 2 * PAGE) -> list[Work]:
        """One pass; returns the requests that ended."""
        columns = self.table.columns
        rows, counts = self.table.plan(prefill)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            for place in range(columns.cached[row], columns.cached[row] + count):
                self.cache.tokens[columns.tables[row, place // PAGE], place % PAGE] = columns.ids[row, place]
        columns.cached[rows] += counts
        self.fed += int(counts.sum())
        due = rows[columns.cached[rows] == columns.known[rows]]
        columns.ids[due, columns.known[due]] = 100 + columns.known[due] - columns.start[due]
        columns.known[due] += 1
        over = set(due[columns.known[due] >= columns.limit[due]].tolist())
        ended = [self.table.end(sequence) for sequence in list(self.table.running) if sequence.row in over]
        self.table.admit()
        return ended

    def finish(self, *, close: bool = False) -> dict[str, Work]:
        """Step until nothing decodes; sessions are closed when they have ended, or not."""
        ended: dict[str, Work] = {}
        while self.table.running:
            for work in self.step():
                ended[work.request_id] = work
                if close:
                    self.table.close(work.session_id)
                    self.table.admit()
            self.check()
        return ended

    def live(self) -> list[Sequence]:
        return self.table._live()

    def check(self) -> None:
        """What every sequence counts as cached is there, and every page is free or held by as many as it says."""
        columns, held = self.table.columns, [page for sequence in self.live() for page in sequence.pages]
        for sequence in self.live():
            for place in range(columns.cached[sequence.row]):
                page = columns.tables[sequence.row, place // PAGE]
                assert page == sequence.pages[place // PAGE].number
                assert self.cache.tokens[page, place % PAGE] == columns.ids[sequence.row, place]
        assert len({page.number for page in held}) == self.pages.used
        for page in set(held):
            assert page.holders == held.count(page)

    def cached(self, session: str) -> int:
        row = self.table._sessions[session].row
        return 0 if row is None else int(self.table.columns.cached[row])


def test_pages_of_the_same_tokens_have_the_same_names() -> None:
    ids = np.arange(3 * PAGE + 2)
    assert len(names_of(ids)) == 4
    assert names_of(ids)[:2] == names_of(ids[: 2 * PAGE])
    other = ids.copy()
    other[0] = 9
    assert not set(names_of(other)) & set(names_of(ids))


def test_siblings_hold_the_pages_of_their_prompt_together_and_feed_it_once() -> None:
    table = Table()
    for number in range(4):
        table.ask(str(number))
    assert table.pages.used == 3
    ended = table.finish()
    assert [ended[str(number)].written for number in range(4)] == [(100, 101, 102, 103)] * 4
    assert table.fed == len(LONG) + 3 + 3 * 4, "the prompt once, then its last token and three of their own"
    assert table.pages.used == 2 + 4, "two full pages for all, and the last one for each"


def test_a_long_prompt_is_fed_in_stretches_beside_the_others() -> None:
    table = Table()
    table.ask("decodes", (1, 2), new=30)
    table.step()
    table.ask("long", range(10, 10 + 4 * PAGE))
    for steps in range(1, 4):
        table.step(prefill=PAGE)
        assert (table.cached("long"), table.cached("decodes")) == (steps * (PAGE + 1), 2 + steps)


def test_a_session_goes_on_where_its_cache_ends_or_where_it_says_something_else() -> None:
    table = Table()
    table.ask("a")
    table.finish()
    fed, kept = table.fed, table.cached("a")
    table.ask("a", (*LONG, 100, 101, 102, 103, 7, 8), new=1)
    table.finish()
    assert (kept, table.fed - fed) == (len(LONG) + 3, 3)
    table.ask("a", (*LONG[: PAGE + 3], 99, 98))
    assert table.cached("a") == PAGE, "the pages before it"
    assert table.finish()["a"].written == (100, 101, 102, 103)


def test_a_newcomer_takes_no_page_from_who_waits_for_a_tool() -> None:
    table = Table(pages=6)
    table.ask("tool", range(50, 50 + 4 * PAGE), new=1)
    table.finish()
    table.ask("newcomer")
    assert (len(table.table.running), table.cached("tool")) == (0, 4 * PAGE)
    table.ask("tool", (*range(50, 50 + 4 * PAGE), 100, 7))
    assert table.finish()["tool"].written == (100, 101, 102, 103)
    table.table.close("tool")
    table.table.admit()
    assert table.finish()["newcomer"].written == (100, 101, 102, 103)
    assert table.table.evictions == 0


def test_the_newest_gives_its_pages_up_and_writes_on_later() -> None:
    table = Table(pages=8)
    for number, session in enumerate("abc"):
        table.ask(session, (number, number), new=4 * PAGE)
    ended = table.finish(close=True)
    assert table.table.evictions > 0
    assert all(ended[session].written == tuple(range(100, 100 + 4 * PAGE)) for session in "abc")
    assert next(iter(ended)) == "a"


def test_who_comes_back_to_its_pages_does_not_wait_for_an_older_one_that_lacks_room() -> None:
    table = Table(pages=6)
    table.ask("older", range(50, 50 + 2 * PAGE), new=1)
    table.ask("newer", range(150, 150 + 3 * PAGE), new=1)
    table.finish()
    table.table._give_up(table.table._sessions["older"])
    table.ask("older", range(300, 300 + 4 * PAGE))
    table.ask("newer", (*range(150, 150 + 3 * PAGE), 100, 7))
    assert [sequence.session_id for sequence in table.table.running] == ["newer"]
    assert list(table.finish(close=True)) == ["newer", "older"]


def test_a_sequence_may_take_all_pages_and_be_fed_again() -> None:
    table = Table(pages=POSITIONS // PAGE)
    table.ask("only", range(POSITIONS - 8), new=4)
    table.step()
    table.table.forget_all()
    table.table.admit()
    assert table.finish()["only"].written == (100, 101, 102, 103)


def test_who_gives_its_own_pages_up_keeps_nobody_from_decoding() -> None:
    table = Table(pages=8)
    table.ask("older", range(3 * PAGE), new=2 * PAGE + 8)
    table.ask("newer", range(500, 500 + PAGE + 2), new=2 * PAGE)
    while not table.table.evictions:
        before = table.cached("older")
        table.step()
    assert (table.cached("newer"), table.cached("older")) == (0, before + 1)


def test_who_waits_gets_the_pages_of_the_newest_that_does_not_decode() -> None:
    table = Table(pages=6)
    table.ask("older", range(50, 50 + 2 * PAGE), new=1)
    table.ask("newer", range(150, 150 + 2 * PAGE), new=1)
    table.finish()
    table.ask("waits", range(4 * PAGE))
    table.table.evict()
    table.table.admit()
    assert (table.cached("older"), table.cached("newer"), len(table.table.running)) == (2 * PAGE, 0, 0)
    table.table.evict()
    table.table.admit()
    assert len(table.table.running) == 1


def test_requests_of_one_session_are_answered_in_order_and_closing_gives_all_back() -> None:
    table = Table()
    for request in ("first", "second", "third"):
        table.ask("a", request=request)
    assert table.table.abort("second") is not None
    assert list(table.finish()) == ["first", "third"]
    for session, request in (("a", "fourth"), ("a", "fifth"), ("b", "sixth")):
        table.ask(session, request=request)
    assert [work.request_id for work in table.table.close("a")] == ["fourth", "fifth"]
    assert [work.request_id for work in table.table.clear()] == ["sixth"]
    assert (table.pages.used, table.table.running, table.table.waiting) == (0, [], [])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(6, 20))
def test_whatever_happens_every_request_ends_as_if_it_were_alone(seed: int, rows: int, pages: int) -> None:
    """Sessions of several turns that open alike, wait, are aborted and closed, in few pages, under changing weights."""
    rng = random.Random(seed)
    table = Table(rows=rows, pages=pages)
    texts: dict[str, list[int]] = {}
    asked: dict[str, int] = {}
    for number in range(60):
        session = str(rng.randrange(8))
        match rng.randrange(8):
            case 0:
                table.table.close(session)
                texts.pop(session, None)
                asked.pop(session, None)
                table.table.admit()
            case 1 if session in asked:
                table.table.abort(session)
                table.table.admit()
                del asked[session]
                kept = rng.randrange(40)
                texts[session] = [*texts[session][:kept], *(rng.randrange(50) for _ in range(rng.choice((1, 30))))]
            case 2:
                rng.choice((table.table.evict, table.table.forget_all))()
                table.table.admit()
            case 3 | 4 if session not in asked:
                text = texts.setdefault(session, list(range(rng.choice((1, 5, PAGE, PAGE + 1, 30, 60)))))
                text += [number + 1000] * rng.randrange(4)
                asked[session] = rng.randrange(1, 2 * PAGE)
                if len(text) + asked[session] < POSITIONS:
                    table.ask(session, text, asked[session])
                else:
                    table.table.close(session)
                    del asked[session], texts[session]
            case _:
                for work in table.step(rng.choice((1, PAGE, 3 * PAGE))):
                    assert work.written == tuple(range(100, 100 + asked.pop(work.session_id)))
                    texts[work.session_id] += work.written
        table.check()
    while asked:
        if not table.table.running:
            table.table.evict()
            table.table.admit()
        for work in table.step():
            assert work.written == tuple(range(100, 100 + asked.pop(work.session_id)))
    table.table.clear()
    assert (table.pages.used, table.pages._named) == (0, {})
