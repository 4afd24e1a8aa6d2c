"""Search in what was written: file after file, the newest first, in a thread of its own; the list shows what was found
so far. The same text is looked for once, however often its page is asked for."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

import duckdb

from rocstar.record.table import READ, SAID
from rocstar.view.index import Index

KEPT_SEARCHES = 8
SHORTEST = 2  # characters of a text that is looked for
WAIT_SECONDS = 0.15  # of the first answer for what can be found at once
# Replies of tools stand in `turns`, as JSON.
FOUND = f"""
INSERT INTO found.hits SELECT ?, ?, file_row_number FROM {READ} WHERE {SAID} OR contains(lower(turns), ?)
"""


@dataclass(slots=True)
class Search:
    """One text in the files of an index."""

    number: int
    text: str
    done: int = 0
    files: set[int] = field(default_factory=set)
    """Those that were, or are being, looked into."""
    idle: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False


class Searches:
    """The last few texts that were looked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[str, Search] = OrderedDict()
        self._next, self._choosing = 0, threading.Lock()
        index.ask("ATTACH IF NOT EXISTS ':memory:' AS found")
        index.ask("CREATE TABLE IF NOT EXISTS found.hits (search INTEGER, file INTEGER, row INTEGER)")

    def find(self, text: str) -> Search:
        """Looks into the files that were not looked into yet, then waits a moment."""
        with self._choosing:
            search = self._kept.get(text) or self._new(text)
            self._kept.move_to_end(text)
            while len(self._kept) > KEPT_SEARCHES:
                self._drop(self._kept.popitem(last=False)[1])
            if search.idle.is_set():
                self._begin(search)
        search.idle.wait(WAIT_SECONDS)
        return search

    def _new(self, text: str) -> Search:
        self._next += 1
        search = self._kept[text] = Search(self._next, text)
        search.idle.set()
        return search

    def _begin(self, search: Search) -> None:
        files = self._index.ask("SELECT id, path FROM files WHERE broken IS NULL ORDER BY step DESC, part")
        new = [(number, path) for number, path in files if number not in search.files]
        if new:
            search.files |= {number for number, _ in new}
            search.idle.clear()
            threading.Thread(target=self._look, args=(search, new), name="view-search", daemon=True).start()

    def _look(self, search: Search, files: list[tuple[int, str]]) -> None:
        wanted = search.text.lower()
        escaped = json.dumps(wanted)[1:-1]
        try:
            for number, path in files:
                if search.dropped:
                    return
                file = str(self._index.source.root / path)
                with suppress(duckdb.Error):  # closed, or gone meanwhile: then its attempts leave the table as well
                    self._index.ask(FOUND, [search.number, number, file, wanted, wanted, escaped])
                search.done += 1
        finally:
            search.idle.set()

    def _drop(self, search: Search) -> None:
        search.dropped = True
        self._index.ask("DELETE FROM found.hits WHERE search = ?", [search.number])
