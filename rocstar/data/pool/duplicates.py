"""Find questions that were there before: the same text, or nearly the same text with the same answer.

The index is an SQLite file on disk, so memory does not grow with the number of questions. Near means: at least 0.7 of
all three-token shingles of the two are shared (Jaccard), the answers being equal; with another answer a similar text
is another problem (the same exercise with other numbers). Candidates come from one-permutation MinHash: 16 bins, eight
bands of two, which finds a pair at 0.7 with a chance of 0.995 and a closer one more surely.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from rocstar.data.pool.text import shingles, token_key, tokens

BINS = 16
MAX_CANDIDATES = 50  # per question; bounds the work where thousands of exercises share a wording and an answer
CACHE_KIB = 65536  # of the index in memory

_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA temp_store = FILE;
CREATE TABLE seen (number INTEGER PRIMARY KEY, key BLOB, answer TEXT, shown TEXT, name TEXT, shingles BLOB);
CREATE TABLE band (value INTEGER, number INTEGER, PRIMARY KEY (value, number)) WITHOUT ROWID;
CREATE UNIQUE INDEX seen_key ON seen (key);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    name: str
    """Name of the earlier question, as it was given to `add`."""
    answer: str
    """Its answer, as it was shown to `add`."""
    same_answer: bool
    """The two answers were given in the same form; always so where the texts are only alike."""
    likeness: float
    """Share of shingles in common, 0 to 1; 1.0 for the same text."""
    exact: bool

    @property
    def evidence(self) -> str:
        if self.exact:
            return f"same text as {self.name}"
        return f"{self.likeness:.2f} of the text is that of {self.name}, same answer {self.answer}"


class QuestionIndex:
    """Every question kept so far. Use as a context manager; the file is the caller's to delete."""

    def __init__(self, file: Path, *, near: float) -> None:
        """near: likeness from which on a text with the same answer is a repeat; above 1 finds equal texts only."""
        self._near = near
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(_TABLES)
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("BEGIN")
        self._count = 0

    def __enter__(self) -> QuestionIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._database.close()

    def add(self, question: str, answer: str, name: str, *, form: str) -> Match | None:
        """The earlier question that this one repeats; None and it is remembered. Order matters: first come, first kept.

        form: what answers are compared by, equal for equal answers. A Match that is exact may have another one: then
        one of the two labels is wrong."""
        found = tokens(question)
        key = token_key(found)
        row = self._database.execute("SELECT name, shown, answer FROM seen WHERE key = ?", (key,)).fetchone()
        if row is not None:
            return Match(name=row[0], answer=row[1], same_answer=row[2] == form, likeness=1.0, exact=True)
        pieces = shingles(found)
        bands = _bands(pieces, form)
        if self._near <= 1 and (match := self._nearest(pieces, bands)):
            return match
        self._count += 1
        blob = array("I", sorted(pieces)).tobytes()
        self._database.execute(
            "INSERT INTO seen VALUES (?, ?, ?, ?, ?, ?)", (self._count, key, form, answer, name, blob)
        )
        self._database.executemany(
            "INSERT OR IGNORE INTO band VALUES (?, ?)", ((value, self._count) for value in bands)
        )
        return None

    def _nearest(self, pieces: frozenset[int], bands: Sequence[int]) -> Match | None:
        marks = ", ".join("?" * len(bands))
        candidates = self._database.execute(
            f"SELECT name, shown, shingles FROM seen WHERE number IN "
            f"(SELECT DISTINCT number FROM band WHERE value IN ({marks}) ORDER BY number LIMIT {MAX_CANDIDATES}) "
            "ORDER BY number",
            bands,
        )
        best: Match | None = None
        for name, answer, blob in candidates:
            theirs = array("I")
            theirs.frombytes(blob)
            shared = len(pieces.intersection(theirs))
            likeness = shared / (len(pieces) + len(theirs) - shared)
            if likeness >= self._near and (best is None or likeness > best.likeness):
                best = Match(name=name, answer=answer, same_answer=True, likeness=likeness, exact=False)
        return best


def _bands(pieces: frozenset[int], answer: str) -> list[int]:
    """Eight signed 64-bit values, fewer for short texts: each hashes the answer with the least shingles of two bins."""
    least: list[int | None] = [None] * BINS
    for piece in pieces:
        place = piece % BINS
        held = least[place]
        if held is None or piece < held:
            least[place] = piece
    pairs = [(place, least[place], least[place + 1]) for place in range(0, BINS, 2)]
    return [_hash64(f"{pair}{answer}") for pair in pairs if pair[1:] != (None, None)]


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
