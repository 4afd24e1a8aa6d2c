"""A small table of all attempts of a run, so that lists and filters need no bodies: one DuckDB file in the user's cache
folder, made from the parquet files and made again where it is missing. It is never the truth. Beside it searches in
what was written: file after file, the newest first, in a thread of its own, so that the list shows what was found so
far.

Not here: questions to the table (query.py) and what the page shows of an attempt (attempt.py)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from rocstar.record.rollouts import COLUMNS, Row
from rocstar.record.table import READ, ROWS, SAID, SETTINGS, failures_in, rows_in
from rocstar.support.scratch import cache_home
from rocstar.view.sources import AttemptFile, RunSource

VERSION = 1  # of the tables; an older file is left alone and in time deleted
LOOK_SECONDS = 1.0  # between two looks at the folder
TOGETHER_BYTES = 16 * 2**20  # of files that are taken up in one go: each commit waits for the disk
KEPT_DAYS = 30.0  # after which an unopened index is deleted
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id INTEGER, path VARCHAR, part VARCHAR, step INTEGER, modified BIGINT, bytes BIGINT, broken VARCHAR);
CREATE TABLE IF NOT EXISTS problems (problem_id VARCHAR PRIMARY KEY, question VARCHAR, gold VARCHAR, source VARCHAR);
CREATE TABLE IF NOT EXISTS attempts (
    file INTEGER, row INTEGER, grp INTEGER, part VARCHAR, step INTEGER, problem_id VARCHAR, sibling INTEGER,
    verdict VARCHAR, reward FLOAT, extracted VARCHAR, method VARCHAR,
    penalty_errors FLOAT, penalty_format FLOAT, penalty_total FLOAT, kept BOOLEAN, reason VARCHAR, weight FLOAT,
    advantage FLOAT, stop VARCHAR, fault VARCHAR, tokens INTEGER, turns INTEGER, calls INTEGER, failed_calls INTEGER,
    seconds FLOAT, tool_seconds FLOAT, policy_version BIGINT, entropy FLOAT, tools VARCHAR[], errors VARCHAR[],
    preview VARCHAR);
"""
ROWS_OF_FILE = f"INSERT INTO attempts BY NAME SELECT ? AS file, ? AS part, * REPLACE (? AS step) FROM ({ROWS})"
PROBLEMS = f"""
INSERT OR IGNORE INTO problems
SELECT problem_id, any_value(question), any_value(gold), any_value(source) FROM {READ} GROUP BY problem_id
"""
Found = tuple[AttemptFile, os.stat_result]
"""A file, and its state on disk when it was found."""


STRANGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading JSON of another shape than ours ends in."""


@dataclass(slots=True)
class Index:
    """The table of one source. Any thread may ask; one at a time takes up new files."""

    source: RunSource
    _connection: duckdb.DuckDBPyConnection
    _file: Path
    _ours_alone: bool
    _looked: float = 0.0
    _filling: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False
    _asking: set[duckdb.DuckDBPyConnection] = field(default_factory=set)
    waiting: int = 1
    """Number of files not in the table yet; 1 until the first look, which another thread may be making."""
    _last_number: int = 0
    """The last file's number; none is given again while this index is open, because searches remember them."""

    @classmethod
    def open(cls, source: RunSource, cache: Path | None = None) -> Index:
        """The stored table; a private new one if another process has it; a broken one is replaced."""
        name = hashlib.sha256(str(source.root.resolve()).encode()).hexdigest()[:24]
        try:
            folder = cache or cache_home() / "view"
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{name}-{VERSION}.duckdb"
            connection, alone = _opened(file), False
        except (duckdb.Error, OSError):
            file = Path(tempfile.mkdtemp(prefix="rocstar-view-")) / "index.duckdb"
            connection, alone = duckdb.connect(file, config=SETTINGS), True
        connection.execute(TABLES)
        return cls(source=source, _connection=connection, _file=file, _ours_alone=alone)

    def close(self) -> None:
        """Let the table go; one of this process alone is deleted."""
        self._closed = True
        for cursor in list(self._asking):
            cursor.interrupt()
        with self._filling:
            self._connection.close()
        if self._ours_alone:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
                self._file.parent.rmdir()

    @contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """For one question of one thread."""
        with self._connection.cursor() as cursor:
            self._asking.add(cursor)
            try:
                yield cursor
            finally:
                self._asking.discard(cursor)

    def broken(self) -> list[str]:
        """Files that could not be read, each with the reason."""
        return [f"{path}: {why}" for path, why in self.ask("SELECT path, broken FROM files WHERE broken IS NOT NULL")]

    def ask(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.cursor() as cursor:
            found: list[tuple[Any, ...]] = cursor.execute(sql, list(values)).fetchall()
            return found

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        with self.cursor() as cursor:
            found = cursor.execute(sql, list(values))
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def bodies(self, file: int, first: int, last: int, columns: Sequence[str] = tuple(COLUMNS)) -> list[Row]:
        """Rows of a parquet file from one number to another, decoded; none where the file is not there. Raises
        duckdb.Error for a broken file."""
        path = self.ask("SELECT path FROM files WHERE id = ?", [file])
        if not path:
            return []
        with self.cursor() as cursor:
            return rows_in(cursor, str(self.source.root / path[0][0]), range(first, last + 1), columns)

    def follow(self) -> None:
        """Add new files in a separate thread, unless one is running or has just looked."""
        if time.monotonic() - self._looked < LOOK_SECONDS or not self._filling.acquire(blocking=False):
            return
        self._looked = time.monotonic()
        try:
            missing = self._missing()
        except BaseException:
            self._filling.release()
            raise
        self.waiting = len(missing)
        if missing:
            threading.Thread(target=self._fill, args=(missing,), name="view-index", daemon=True).start()
        else:
            self._filling.release()

    def settle(self) -> None:
        """Wait until every file of this moment is in the table."""
        with self._filling:
            missing = self._missing()
            self.waiting = len(missing)
            self._take_all(missing)

    def _fill(self, missing: Sequence[Found]) -> None:
        try:
            self._take_all(missing)
        except duckdb.Error:
            if not self._closed:
                raise
        finally:
            self._filling.release()

    def _take_all(self, missing: Sequence[Found]) -> None:
        left = deque(missing)
        while left and not self._closed:
            some = [left.popleft()]
            while left and sum(state.st_size for _, state in some) < TOGETHER_BYTES:
                some.append(left.popleft())
            self._take(some)
            self.waiting = len(left)

    def _take(self, files: Sequence[Found]) -> None:
        """Add files in one transaction. If one cannot be read (cut short, or not of attempts), add each on its own and
        remember that one with the reason."""
        try:
            with self._transaction() as cursor:
                for file, state in files:
                    part, step, path = file
                    number, failed = self._remember(cursor, file, state, None), failures_in(cursor, str(path))
                    cursor.execute(PROBLEMS, [str(path)])
                    cursor.execute(ROWS_OF_FILE, [number, part, step, str(path), *failed])
        except duckdb.OutOfMemoryException:
            return  # of no fault of the file's: the next look finds it again
        except (duckdb.Error, *STRANGE) as error:
            if self._closed:
                return
            if len(files) > 1:
                for one in files:
                    self._take([one])
                return
            with self._transaction() as cursor:
                self._remember(cursor, *files[0], (str(error) or type(error).__name__).splitlines()[0][:300])

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self.cursor() as cursor:
            cursor.begin()
            try:
                yield cursor
            except BaseException:
                with suppress(duckdb.Error):
                    cursor.rollback()
                raise
            cursor.commit()

    def _missing(self) -> list[Found]:
        """Files that are new or were written anew, the newest first; those that are gone leave the table."""
        there: dict[str, Found] = {}
        for part, step, path in self.source.attempt_files():
            with suppress(OSError):  # gone since
                there[str(path.relative_to(self.source.root))] = (part, step, path), path.stat()
        known = {
            path: (number, *state) for number, path, *state in self.ask("SELECT id, path, modified, bytes FROM files")
        }
        same = {
            path for path, (_, found) in there.items() if known.get(path, ())[1:] == (found.st_mtime_ns, found.st_size)
        }
        if gone := [known[path][0] for path in known.keys() - same]:
            with self._transaction() as cursor:
                for table, column in (("attempts", "file"), ("files", "id")):
                    cursor.execute(f"DELETE FROM {table} WHERE list_contains(?::INTEGER[], {column})", [gone])
        return [there[path] for path in there if path not in same]

    def _remember(
        self, cursor: duckdb.DuckDBPyConnection, file: AttemptFile, state: os.stat_result, broken: str | None
    ) -> int:
        highest: int = cursor.execute("SELECT coalesce(max(id), 0) FROM files").fetchall()[0][0]
        number = self._last_number = max(highest, self._last_number) + 1
        part, step, path = file
        known = None if broken else step  # a broken file's step may not fit into the column
        place = str(path.relative_to(self.source.root))
        row = [number, place, part, known, state.st_mtime_ns, state.st_size, broken]
        cursor.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return number


def sweep_cache(cache: Path | None) -> None:
    """Delete tables that were not opened for KEPT_DAYS."""
    oldest = time.time() - KEPT_DAYS * 86400
    with suppress(OSError):
        for file in (cache or cache_home() / "view").glob("*.duckdb*"):
            if file.stat().st_mtime < oldest:
                file.unlink()


def _opened(file: Path) -> duckdb.DuckDBPyConnection:
    """Raises duckdb.IOException where another process has it."""
    try:
        return duckdb.connect(file, config=SETTINGS)
    except duckdb.IOException as error:
        if "lock" in str(error):
            raise
    except duckdb.Error:
        pass
    file.unlink(missing_ok=True)  # broken, or of another DuckDB
    return duckdb.connect(file, config=SETTINGS)


KEPT_SEARCHES = 8
SHORTEST = 2  # characters of a text that is looked for
WAIT_SECONDS = 0.15  # of the first answer for what can be found at once
# Replies of tools stand in `turns`, as JSON. {last}: the number of the file's last row.
FOUND = f"""
INSERT INTO found.hits SELECT ?, ?, bitstring_agg(file_row_number, 0, {{last}})
FROM {READ} WHERE {SAID} OR contains(lower(turns), ?)
"""


@dataclass(slots=True)
class Search:
    """One text in the files of an index."""

    number: int
    text: str
    done: int = 0
    files: set[int] = field(default_factory=set)
    """Numbers of the files that were, or are being, looked into."""
    idle: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False


class Searches:
    """The last few texts that were looked for; the same text is looked for once, however often its page is asked
    for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._kept: OrderedDict[str, Search] = OrderedDict()
        self._next, self._choosing = 0, threading.Lock()
        index.ask("ATTACH IF NOT EXISTS ':memory:' AS found")
        # A bit for each attempt of a file: a common word stands in millions, whose numbers would fill the memory.
        index.ask("CREATE TABLE IF NOT EXISTS found.hits (search INTEGER, file INTEGER, bits BIT)")

    def find(self, text: str) -> Search:
        """Looks into the files that were not looked into yet, then waits a moment."""
        with self._choosing:
            search = self._kept.get(text)
            if search is None:
                self._next += 1
                search = self._kept[text] = Search(self._next, text)
                search.idle.set()
            self._kept.move_to_end(text)
            while len(self._kept) > KEPT_SEARCHES:
                _, dropped = self._kept.popitem(last=False)
                dropped.dropped = True
                self._index.ask("DELETE FROM found.hits WHERE search = ?", [dropped.number])
            if search.idle.is_set():
                files = self._index.ask("SELECT id, path FROM files WHERE broken IS NULL ORDER BY step DESC, part")
                if new := [(number, path) for number, path in files if number not in search.files]:
                    search.files |= {number for number, _ in new}
                    search.idle.clear()
                    threading.Thread(target=self._look, args=(search, new), name="view-search", daemon=True).start()
        search.idle.wait(WAIT_SECONDS)
        return search

    def _look(self, search: Search, files: list[tuple[int, str]]) -> None:
        needle = search.text.lower()
        escaped = json.dumps(needle)[1:-1]
        try:
            for number, path in files:
                if search.dropped:
                    return
                file = str(self._index.source.root / path)
                with suppress(duckdb.Error):  # closed, or gone meanwhile: then its attempts leave the table as well
                    last = self._index.ask("SELECT coalesce(max(row), 0) FROM attempts WHERE file = ?", [number])
                    sql = FOUND.format(last=int(last[0][0]))
                    self._index.ask(sql, [search.number, number, file, needle, needle, escaped])
                search.done += 1
        finally:
            search.idle.set()
