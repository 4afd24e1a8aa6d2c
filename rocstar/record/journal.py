"""Append-only JSONL: `metrics.jsonl` and `events.jsonl`, one object a line, each flushed as it is written.

A kill can tear the last line; the reader skips such a line and the writer removes it before it continues.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Any

from rocstar.errors import DataError
from rocstar.record.atomic import plain, write_atomic


class Journal(AbstractContextManager["Journal"]):
    """One JSONL file, open for appending from the first append on. Any thread may append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._appending = threading.Lock()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line. Raises OSError (disk full); then the file still ends with a whole line."""
        line = (json.dumps(plain(row)) + "\n").encode()
        with self._appending:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.ftruncate(self._handle, self.path.read_bytes().rfind(b"\n") + 1)  # remove a torn last line
            end = os.fstat(self._handle).st_size
            try:
                while line:
                    line = line[os.write(self._handle, line) :]
            except OSError as error:
                error.filename = str(self.path)
                os.ftruncate(self._handle, end)
                raise

    def truncate_after(self, step: int) -> None:
        """Drop rows of later steps than `step`; rows without a step stay."""
        self.close()
        rows = [row for row in read_journal(self.path) if row.get("step", step) <= step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path, needs: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """All complete rows; none if there is no file. needs: required keys of each row, with the types of their values.
    Raises DataError for a broken line that is not the last, and for a row without a required key."""
    content = path.read_bytes() if path.exists() else b""
    rows = []
    # The part after the last newline is empty, or torn by a kill.
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is not a JSON object; delete that line to read the rest")
        for key, kind in (needs or {}).items():
            if not isinstance(row.get(key), kind):
                raise DataError(f'{path} line {number} has no "{key}" that fits; delete that line to read the rest')
        rows.append(row)
    return rows


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics, by name."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not isinstance(value, bool)}


class Tail:
    """Reads the lines added to a file since the last look, for followers of its writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._last = 0, b""

    def fresh(self) -> tuple[bool, Sequence[bytes]]:
        """(whether the file is read from its beginning, because it was replaced or became shorter (resume) or this is
        the first look; its new complete lines, with newlines). A line being written is left for the next look."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False, ()
        with file:
            file.seek(self._at - len(self._last))  # not by its inode, which a new file gets again where one was removed
            if anew := not self._last or file.read(len(self._last)) != self._last:
                self._at = file.seek(0)
            lines = list(takewhile(lambda line: line.endswith(b"\n"), file))
        self._at += sum(map(len, lines))
        self._last = lines[-1] if lines else b"" if anew else self._last
        return anew, lines
