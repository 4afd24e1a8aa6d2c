"""Rows that passed, on disk in the order they came, with an index in memory: a mix draws from them by position."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import TracebackType

from rocstar.data.sft.format import Conversation, dumped, row_of


class Shelf:
    """One file for all sources; about 350 bytes of memory a row. A context manager that removes its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._places = array("Q")
        self._tokens = array("L")
        self.ids: list[str] = []
        """`Conversation.id` of each row."""
        self._known: set[str] = set()
        self._starts: dict[str, range] = {}

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, conversation: Conversation, tokens: int) -> bool:
        """Keep a row, `tokens` long; False when an equal one is there already. Rows of a source come together."""
        identity = conversation.id
        if identity in self._known:
            return False
        self._known.add(identity)
        self._places.append(self._file.tell())
        self._tokens.append(tokens)
        self.ids.append(identity)
        self._file.write(dumped(row_of(conversation)).encode() + b"\n")
        name, end = conversation.source, len(self.ids)
        self._starts[name] = range(self._starts.get(name, range(end - 1, end)).start, end)
        return True

    def positions(self, source: str) -> range:
        """Where the rows of a source stand."""
        return self._starts.get(source, range(0))

    def lengths(self, positions: list[int] | range) -> list[int]:
        """Tokens of each row; 0 where nothing was measured."""
        return [self._tokens[n] for n in positions]

    def line(self, position: int) -> bytes:
        """A row as one line, line end included."""
        self._file.seek(self._places[position])
        return self._file.readline()
