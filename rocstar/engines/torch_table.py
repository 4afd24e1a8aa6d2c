"""The sequences of the decoder: which decode, which wait, whose cache is kept, and which is evicted for lack of room.

The order in which sessions were opened decides. Older ones begin first; a session keeps its pages while its tool runs;
when one that decodes needs a page and none is free, the newest session gives up its pages, even if it is the one that
needs the page. So a new session never evicts one that waits for its tool, and the oldest always advances. Not here: the
arithmetic (torch_decoder.py).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from rocstar.engines.pages import PAGE, Page, PagePool, names_of
from rocstar.support.layers import BLOCK
from rocstar.types import Sampling

AGE = attrgetter("age")
Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One request inside the decoder."""

    request_id: str
    session_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    owner: Any = None
    """Opaque to the decoder; returned with the completion."""
    written: tuple[int, ...] = ()
    """Tokens sampled so far; kept here while the request does not decode."""
    logprobs: tuple[float, ...] = ()
    """One for each token in `written`."""
    versions: tuple[int, ...] = ()
    """Policy version that wrote each token in `written`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The tokens of one session, and its cache."""

    session_id: str
    age: int
    """Sessions are numbered in the order in which they were opened."""
    work: Work | None = None
    """None while its tool runs."""
    behind: deque[Work] = field(default_factory=deque)
    """Requests that came while `work` had not ended, in order."""
    row: int | None = None
    """Its row in `SequenceColumns` while it decodes or any of it is cached."""
    pages: list[Page] = field(default_factory=list)
    opening: int = 0
    """Positions that other sequences may fill: its pages there hold the same tokens as theirs."""
    lost: int = 0
    """Positions that were cached when its pages were last evicted."""
    begins: npt.NDArray[np.bool_] | None = None
    """Where its stretches began before that; None if nothing was cached."""


class SequenceColumns:
    """Numbers of each sequence as arrays, so that a step touches Python objects only for the few that need more than
    one more token. Grows with the sequences whose cache is kept while their tools run."""

    def __init__(self, rows: int, positions: int) -> None:
        self.positions = positions
        self.ids = np.zeros((rows, positions), dtype=np.int32)
        self.logprobs = np.zeros((rows, positions), dtype=np.float32)
        self.versions = np.zeros((rows, positions), dtype=np.int32)
        self.tables = np.zeros((rows, -(-positions // PAGE)), dtype=np.int32)
        """Page numbers of each row."""
        self.begins = np.zeros((rows, positions + 1), dtype=np.bool_)
        """Positions at which a stretch of tokens began that was fed at once."""
        self.cached = np.zeros(rows, dtype=np.int64)
        """Tokens with keys and values."""
        self.known = np.zeros(rows, dtype=np.int64)
        """Known tokens."""
        self.room = np.zeros(rows, dtype=np.int64)
        """Positions up to which it may write without a new page."""
        self.ready = np.zeros(rows, dtype=np.int64)
        """Tokens that the next pass feeds."""
        self.lost = np.zeros(rows, dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.seeds = np.zeros(rows, dtype=np.int64)
        self.top_ks = np.zeros(rows, dtype=np.int64)
        self.temperatures, self.top_ps = np.ones(rows), np.ones(rows)
        self.stops = np.full((rows, 1), -1, dtype=np.int64)
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int:
        """A free row; if there is none, the columns double."""
        if not self._free:
            rows = len(self.ids)
            for name, column in vars(self).items():
                if isinstance(column, np.ndarray):
                    setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)

    def set_work(self, row: int, work: Work) -> None:
        """Enter a request's settings."""
        sampling, count, known = work.sampling, len(work.token_ids), len(work.token_ids) + len(work.written)
        self.ids[row, :count], self.ids[row, count:known] = work.token_ids, work.written
        self.logprobs[row, count:known], self.versions[row, count:known] = work.logprobs, work.versions
        self.start[row], self.known[row] = count, known
        self.limit[row] = min(count + sampling.max_new_tokens, self.positions)
        self.seeds[row], self.top_ks[row] = sampling.seed, sampling.top_k
        self.temperatures[row], self.top_ps[row] = sampling.temperature, sampling.top_p
        lacking = len(sampling.stop_token_ids) - self.stops.shape[1]
        if lacking > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, lacking)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def save_work(self, row: int, work: Work) -> None:
        """Save the tokens written so far to the request."""
        begin, end = int(self.start[row]), int(self.known[row])
        work.written = tuple(self.ids[row, begin:end].tolist())
        work.logprobs = tuple(self.logprobs[row, begin:end].tolist())
        work.versions = tuple(self.versions[row, begin:end].tolist())


class SequenceTable:
    """At most `rows` sequences decode at once, each at most `positions` tokens long, over `pages`.

    copy_page: (from, to) copies the keys and values of a page.

    recurrent: a row's state is that of all fed tokens. Then sequences share no pages, one that continues differently is
    fed from its start, and a stretch that does not reach the end of the known tokens ends at a multiple of BLOCK
    positions, independent of the rest of the pass. The starts of stretches are kept for a sequence whose pages are
    evicted."""

    def __init__(
        self, copy_page: Callable[[int, int], None], pages: PagePool, *, rows: int, positions: int, recurrent: bool
    ) -> None:
        self.columns = SequenceColumns(min(rows, pages.count), positions)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.evictions = 0
        self._copy_page, self._pages, self._most, self._recurrent = copy_page, pages, rows, recurrent
        self._sessions: dict[str, Sequence] = {}
        self._opened = 0
        self._rows: Ints = np.zeros(0, dtype=np.int64)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Let a request wait for its turn, or for the end of its session's request before it."""
        sequence = self._sessions.get(work.session_id)
        if sequence is None:
            sequence = self._sessions[work.session_id] = Sequence(session_id=work.session_id, age=self._opened)
            self._opened += 1
        if sequence.work is None:
            self._ask(sequence, work)
        else:
            sequence.behind.append(work)

    def admit(self) -> None:
        """Begin sequences while there is room, oldest first; one that has pages may pass older ones that lack room."""
        full = False
        for sequence in tuple(self.waiting):
            if len(self.running) >= self._most:
                return
            full = full or not self._fits(sequence)
            if sequence.row is not None or not full:
                self._start(sequence)
                self.waiting.remove(sequence)  # not before: where a start fails, its request still has to be found

    def end(self, sequence: Sequence) -> Work:
        """End its request, with what is written so far; its pages stay."""
        work = self._stopped(sequence)
        sequence.work = None
        if sequence.row is not None and self.columns.cached[sequence.row] < sequence.opening:
            self.columns.room[sequence.row] = 0
            for page in sequence.pages:  # others shall not wait for it
                self._pages.resign(page, sequence, int(self.columns.cached[sequence.row]))
        if sequence.behind:
            self._ask(sequence, sequence.behind.popleft())
        return work

    def abort(self, request_id: str) -> Work | None:
        """End a request in any state; None if there is none of that id."""
        for sequence in self._sessions.values():
            if sequence.work is not None and sequence.work.request_id == request_id:
                return self.end(sequence)
            for work in sequence.behind:
                if work.request_id == request_id:
                    sequence.behind.remove(work)
                    return work
        return None

    def close(self, session_id: str) -> list[Work]:
        """Free a session's pages; returns its requests that had not ended."""
        sequence = self._sessions.pop(session_id, None)
        if sequence is None:
            return []
        works = [self._stopped(sequence), *sequence.behind] if sequence.work else []
        self._release(sequence)
        return works

    def clear(self) -> list[Work]:
        """Close every session; returns the requests that had not ended."""
        return [work for session_id in list(self._sessions) for work in self.close(session_id)]

    def _ask(self, sequence: Sequence, work: Work) -> None:
        sequence.work = work
        insort(self.waiting, sequence, key=AGE)

    def _stopped(self, sequence: Sequence) -> Work:
        """Remove its request from decoding or waiting, and return it."""
        assert sequence.work is not None
        if sequence in self.running:
            assert sequence.row is not None
            self.columns.save_work(sequence.row, sequence.work)
            self.running.remove(sequence)
            self._list_rows()
        else:
            self.waiting.remove(sequence)
        return sequence.work

    def _list_rows(self) -> None:
        self._rows = np.array([sequence.row for sequence in self.running], dtype=np.int64)

    # -- giving pages and giving them up ----------------------------------------------------------------------------

    def evict(self) -> None:
        """Give up the pages of the newest session that does not decode, if there is one."""
        idle = [sequence for sequence in self._live() if sequence not in self.running]
        if idle:
            self._give_up(max(idle, key=AGE))

    def forget_all(self) -> None:
        """Drop all caches; decoding sequences feed their tokens again."""
        for sequence in self._sessions.values():
            if sequence in self.running:
                self._ask(sequence, self._stopped(sequence))
            self._release(sequence)
            sequence.lost, sequence.begins = 0, None

    def _live(self) -> list[Sequence]:
        return [sequence for sequence in self._sessions.values() if sequence.row is not None]

    def _give_up(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self._ask(sequence, self._stopped(sequence))
        sequence.lost = max(sequence.lost, int(self.columns.cached[sequence.row]))
        self.evictions += 1
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._leave_pages(sequence, 0)
            if self._recurrent:
                begins = sequence.begins = self.columns.begins[sequence.row].copy()
                begins[self.columns.cached[sequence.row]] = True  # the next stretch would have begun here
            self.columns.free(sequence.row)
            sequence.row = None

    def _leave_pages(self, sequence: Sequence, kept: int) -> None:
        """Release all but the first `kept`."""
        reach = int(self.columns.cached[sequence.row])
        for page in sequence.pages[kept:]:
            self._pages.leave(page, sequence, reach)
        del sequence.pages[kept:]
        sequence.opening = min(sequence.opening, kept * PAGE)

    def _free_page(self, sequence: Sequence) -> Page | None:
        """A page for it, evicting the newest sequences if needed; None if it was itself the newest."""
        while not self._pages.free:
            newest = max(self._live(), key=AGE)
            self._give_up(newest)
            if newest is sequence:
                return None
        return self._pages.take(sequence)

    def _put(self, sequence: Sequence, index: int, page: Page) -> None:
        sequence.pages[index : index + 1] = [page]
        self.columns.tables[sequence.row, index] = page.number

    # -- beginning --------------------------------------------------------------------------------------------------

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are pages for all its tokens, and one more for each sequence that decodes and may need it."""
        if sequence.row is not None:
            return True
        names = self._names(_tokens(sequence))
        needed = min(len(names) - len(self._pages.known(names)) + 1, self._pages.count)
        growing = self.columns.limit[self._rows] > self.columns.room[self._rows]
        return self._pages.free >= needed + int(growing.sum())

    def _start(self, sequence: Sequence) -> None:
        tokens, work = _tokens(sequence), sequence.work
        assert work is not None
        if sequence.row is None:
            self._open(sequence, tokens)
        else:
            self._keep_common(sequence, sequence.row, tokens)
        assert sequence.row is not None
        self.columns.set_work(sequence.row, work)
        insort(self.running, sequence, key=AGE)
        self._list_rows()

    def _open(self, sequence: Sequence, tokens: Ints) -> None:
        """Assign pages for all but the last token: shared ones first, then new ones."""
        row = sequence.row = self.columns.take()
        self.columns.cached[row] = self.columns.room[row] = 0
        self.columns.lost[row] = sequence.lost
        self.columns.begins[row] = False if sequence.begins is None else sequence.begins
        sequence.opening = 0 if self._recurrent else len(tokens) - 1
        names = self._names(tokens)
        shared = self._pages.known(names)
        for index, page in enumerate(shared):
            page.holders += 1
            self._put(sequence, index, page)
        for index in range(len(shared), len(names)):
            self._put(sequence, index, self._pages.take(sequence, names[index]))

    def _names(self, tokens: Ints) -> list[bytes]:
        """Names of the pages of all but the last token; empty if pages are not shared."""
        names = names_of(tokens[:-1])
        return [b""] * len(names) if self._recurrent else names

    def _keep_common(self, sequence: Sequence, row: int, tokens: Ints) -> None:
        """Keep the cached tokens that the request begins with; only whole pages if it does not extend them all, or if
        its prompt was not fed to the end, since later pages may hold other tokens."""
        cached = int(self.columns.cached[row])
        common = min(cached, len(tokens) - 1)
        differs = np.flatnonzero(self.columns.ids[row, :common] != tokens[:common])
        kept = int(differs[0]) if len(differs) else common
        if kept < max(cached, sequence.opening):
            whole = 0 if self._recurrent else kept // PAGE
            self._leave_pages(sequence, whole)
            self.columns.cached[row] = self.columns.room[row] = whole * PAGE
            self.columns.begins[row] = False
            self.columns.lost[row] = 0

    # -- the next pass ----------------------------------------------------------------------------------------------

    def plan(self, prefill: int) -> tuple[Ints, Ints]:
        """Which rows the next pass feeds, and how many tokens of each: one of each sequence that has only one, and
        about `prefill` in all of the others. Every page that they need is assigned."""
        columns, rows = self.columns, self._rows
        columns.ready[rows] = 1
        more = (columns.known[rows] - columns.cached[rows] > 1) | (columns.cached[rows] >= columns.room[rows])
        for sequence in [self.running[place] for place in np.flatnonzero(more).tolist()]:
            row = sequence.row
            if row is not None:  # else it was just evicted
                ready = columns.ready[row] = self._prepare(sequence, row, prefill + 1)
                prefill -= max(0, ready - 1)
        counts = columns.ready[self._rows]
        return self._rows[counts > 0], counts[counts > 0]

    def _prepare(self, sequence: Sequence, row: int, most: int) -> int:
        """How many of its tokens, at most `most`, can be fed now; 0 if its own pages were evicted."""
        self._adopt(sequence, row)
        begin = place = int(self.columns.cached[row])
        end = min(known := int(self.columns.known[row]), begin + most)
        if self._recurrent and end < known:
            end -= end % BLOCK
        while place < end and self._may_write(sequence, place):
            place = min(end, (place // PAGE + 1) * PAGE)
        if sequence.row is None or place == begin:
            return 0
        self.columns.room[row] = -(-place // PAGE) * PAGE
        return place - begin

    def _adopt(self, sequence: Sequence, row: int) -> None:
        """Count pages of its opening that others have filled as cached."""
        cached = self.columns.cached
        while cached[row] < sequence.opening:
            index = int(cached[row]) // PAGE
            page = sequence.pages[index]
            reach = page.reach if page.writer is None else int(cached[page.writer.row])
            reach = min(reach, (index + 1) * PAGE, sequence.opening)
            if page.writer is sequence or reach <= cached[row]:
                return
            cached[row] = reach

    def _may_write(self, sequence: Sequence, place: int) -> bool:
        """Whether it may write to the page of a position, after getting a page if possible."""
        index = place // PAGE
        page = sequence.pages[index] if index < len(sequence.pages) else None
        if page is not None and page.writer is None and (page.holders == 1 or place < sequence.opening):
            page.writer = sequence
        if page is not None and page.writer is sequence:
            return True
        if page is not None and place < sequence.opening:
            return False  # another fills it with the same tokens
        own = self._free_page(sequence)
        if own is None:
            return False
        if page is not None:
            self._copy_page(page.number, own.number)
            self._pages.leave(page, sequence, place)
        self._put(sequence, index, own)
        return True


def _tokens(sequence: Sequence) -> Ints:
    assert sequence.work is not None
    return np.array((*sequence.work.token_ids, *sequence.work.written), dtype=np.int32)
