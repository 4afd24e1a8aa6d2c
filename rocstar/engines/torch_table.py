"""The rows of the decoder: who decodes, who is paused between two requests, and whose prompt siblings may copy.

Decoding rows stand together at the front (see the picture in torch_cache.py); whoever starts or ends is swapped there
or away. A paused row keeps its cache for its session's next request, until the session is closed or `evict` gives the
row up. Not here: tokens being fed and sampled (torch_decoder.py).
"""

from __future__ import annotations

from rocstar.engines.torch_cache import SlotCache
from rocstar.engines.torch_rows import Columns, Row, Work


class RowTable:
    """Rows, their numbers (`columns`) and their cached keys and values, moved together."""

    def __init__(self, cache: SlotCache, rows: int, positions: int) -> None:
        self.columns = Columns(cache.keys.shape[1], positions)
        self.rows: list[Row | None] = [None] * rows
        self.active = 0
        self.openings: dict[tuple[int, ...], Row] = {}
        self._cache = cache
        self._positions = positions
        self._sessions: dict[str, Row] = {}

    @property
    def used_tokens(self) -> int:
        """Positions held by rows, decoding or paused."""
        return int(self.columns.cached.sum())

    @property
    def works(self) -> list[Work]:
        """Every request that decodes or stands behind one that does."""
        return [work for row in self.rows if row and row.work for work in (row.work, *row.behind)]

    def at_work(self, index: int) -> tuple[Row, Work]:
        """A decoding row and its request."""
        row = self.rows[index]
        assert row is not None and row.work is not None
        return row, row.work

    def running(self, request_id: str) -> int | None:
        """The row of a request; None when it does not run."""
        for index in range(self.active):
            row = self.rows[index]
            if row is not None and row.work is not None and row.work.request_id == request_id:
                return index
        return None

    def knows(self, session_id: str) -> bool:
        """Whether a session has a row, decoding or paused."""
        return session_id in self._sessions

    def place(self, work: Work, *, clock: int) -> bool:
        """Give a request its session's row, or a free one; False when none is free. Where another request of its
        session decodes, it stands behind that."""
        row = self._sessions.get(work.session_id)
        if row is not None and row.work is not None:
            row.behind.append(work)
            return True
        if row is None:
            index = self._vacant()
            if index is None:
                return False
            row = Row(session_id=work.session_id)
            self.rows[index] = row
            self._sessions[work.session_id] = row
            self.columns.known[index] = 0
        index = self.rows.index(row)
        if not self._fill(index, work):
            self._forget_opening(row)
        row.work, row.last_used = work, clock
        self._swap(index, self.active)
        self.active += 1
        return True

    def pause(self, index: int, *, clock: int) -> Work:
        """End a row's request; the row stays where it is until `pause_finished`."""
        row, work = self.at_work(index)
        row.work, row.last_used = None, clock
        return work

    def pause_finished(self) -> None:
        """Move rows without work out of the active region."""
        for index in range(self.active - 1, -1, -1):
            row = self.rows[index]
            if row is None or row.work is None:
                self.active -= 1
                self._swap(index, self.active)

    def close(self, session_id: str) -> list[Work]:
        """Free a session's row; returns its requests that had not ended."""
        row = self._sessions.pop(session_id, None)
        if row is None:
            return []
        works = [row.work, *row.behind] if row.work else []
        row.work, row.behind = None, []
        self.pause_finished()
        self._free(row)
        return works

    def evict(self) -> None:
        """Free the row paused longest, if there is one."""
        paused = [row for row in self.rows[self.active :] if row is not None]
        if paused:
            self.close(min(paused, key=lambda row: row.last_used).session_id)

    def clear(self) -> list[Work]:
        """Free all rows; returns the requests that had not ended."""
        works = self.works
        self.rows = [None] * len(self.rows)
        self.active = 0
        self.columns.cached[:] = 0
        self._sessions.clear()
        self.openings.clear()
        return works

    def forget_all(self) -> None:
        """Nothing is cached any more; decoding rows feed their tokens again."""
        self.columns.cached[:] = 0
        for row in self.openings.values():
            row.opening = ()
        self.openings.clear()

    def _vacant(self) -> int | None:
        return next((i for i in range(self.active, len(self.rows)) if self.rows[i] is None), None)

    def _fill(self, index: int, work: Work) -> bool:
        """Fill in the row's numbers; whether the request extends what the row already holds."""
        columns, sampling, count = self.columns, work.sampling, len(work.token_ids)
        known = int(columns.known[index])
        extends = known <= count and tuple(columns.ids[index, :known]) == work.token_ids[:known]
        if not extends:
            columns.cached[index] = 0
        columns.ids[index, :count] = work.token_ids
        columns.cached[index] = min(columns.cached[index], count - 1)
        columns.known[index] = columns.start[index] = count
        columns.limit[index] = min(count + sampling.max_new_tokens, self._positions)
        columns.seeds[index] = sampling.seed
        columns.temperatures[index], columns.top_ps[index] = sampling.temperature, sampling.top_p
        columns.top_ks[index] = sampling.top_k
        columns.set_stops(index, sampling.stop_token_ids)
        return extends

    def _free(self, row: Row) -> None:
        index = self.rows.index(row)
        self.rows[index] = None
        self.columns.cached[index] = 0
        self._forget_opening(row)

    def _forget_opening(self, row: Row) -> None:
        if row.opening:
            del self.openings[row.opening]
            row.opening = ()

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        targets = [i for i in (a, b) if self.rows[i] is not None]
        sources = [b if i == a else a for i in targets]
        length = int(max((self.columns.cached[i] for i in sources), default=0))
        self._cache.move(sources, targets, length)
        self.columns.move(sources, targets)
        self.columns.cached[[i for i in (a, b) if self.rows[i] is None]] = 0
