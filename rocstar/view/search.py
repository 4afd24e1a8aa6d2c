"""Search in what was written: file after file, the newest first, in a thread of its own; the list shows what was found
so far. The same text is looked for once, however often its page is asked for."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import duckdb

from rocstar.view.index import READ, Index

KEPT_SEARCHES = 8
SHORTEST = 2  # characters of a text that is looked for
WAIT_SECONDS = 0.15  # of the first answer for what can be found at once
# Replies of tools stand in `turns`, as JSON.
FOUND = f"""
INSERT INTO found.hits SELECT ?, ?, file_row_number FROM {READ}
WHERE contains(lower(array_to_string(text, chr(10))), ?) OR contains(lower(turns), ?) OR contains(lower(question), ?)
"""


@dataclass(slots=True)
class Search:
    """One text in all files of an index."""

    number: int
    text: str
    done: int = 0
    of: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False


class Searches:
    """The last few texts that were looked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[tuple[str, int], Search] = OrderedDict()
        self._next, self._choosing = 0, threading.Lock()
        index.ask("ATTACH IF NOT EXISTS ':memory:' AS found")
        index.ask("CREATE TABLE IF NOT EXISTS found.hits (search INTEGER, file INTEGER, row INTEGER)")

    def find(self, text: str) -> Search:
        """Begins where nobody looked for it yet; then waits a moment. A file that came since is looked into again."""
        with self._choosing:
            version = self._index.ask("SELECT coalesce(max(id), 0) FROM files")[0][0]
            search = self._kept.get((text, version))
            if search is None:
                search = self._kept[text, version] = self._begun(text)
            self._kept.move_to_end((text, version))
            while len(self._kept) > KEPT_SEARCHES:
                self._drop(self._kept.popitem(last=False)[1])
        search.over.wait(WAIT_SECONDS)
        return search

    def _begun(self, text: str) -> Search:
        self._next += 1
        search = Search(self._next, text)
        files = self._index.ask("SELECT id, path FROM files WHERE broken IS NULL ORDER BY step DESC, part")
        search.of = len(files)
        threading.Thread(target=self._look, args=(search, files), name="view-search", daemon=True).start()
        return search

    def _look(self, search: Search, files: list[tuple[int, str]]) -> None:
        wanted = search.text.lower()
        escaped = json.dumps(wanted)[1:-1]
        try:
            for number, path in files:
                if search.dropped:
                    return
                self._index.ask(
                    FOUND, [search.number, number, str(self._index.source.root / path), wanted, escaped, wanted]
                )
                search.done += 1
        except duckdb.Error:
            pass  # the index was closed, or a file is gone: what was found stands, and `done` tells the rest
        finally:
            search.over.set()

    def _drop(self, search: Search) -> None:
        search.dropped = True
        self._index.ask("DELETE FROM found.hits WHERE search = ?", [search.number])
