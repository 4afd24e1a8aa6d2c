"""Detects questions that repeat others: earlier ones of the sources (the same text, or nearly the same with the same
answer) and those of benchmarks (the same question, or any 8-gram in common).

Texts are compared by keys for equal ones, shingles for nearly equal ones, and readings for 8-grams. Not covered:
paraphrases and translations, and benchmark questions of fewer than eight words beyond the same text.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from string import punctuation

from rocstar.types import Problem

GRAM_WORDS = 8
"""Words in a gram; the paper drops what shares one with a benchmark (§5.1)."""
SHINGLE_TOKENS = 3

# LaTeX that changes only the appearance: delimiters of mathematics, spacing, fonts, braces.
_LOOKS = re.compile(
    r"\\(?:left|right|displaystyle|text|mathrm|mathbf|textbf|textit|mbox|quad|qquad)(?![a-z])"
    r"|\\[,;:! ]|\\\\|\\[\[\]()]|[${}~]|\\(?=[%$&#])"
)
_TOKEN = re.compile(r"\\?[^\W\d_]+|\d+|[^\w\s]")
_BETWEEN_OTHERS = re.compile(r"(?<!\d) | (?!\d)")
_WORD = re.compile(r"[^\W_]+")
_ASCII_WORD = re.compile(r"[a-z0-9]+")
_MARKED_WORD = re.compile(r"\w+")
_REMOVED = str.maketrans("", "", punctuation)
_UNSEEN = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u2060\ufeff"))  # soft hyphen, zero-width spaces and joiners
_STOPS = frozenset(".,;:?!")


def folded(text: str) -> str:
    """Lower case, with characters that only look different (full-width, ligatures, styled letters) unified and
    invisible ones removed."""
    return (text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_UNSEEN)).lower()


def tokens(text: str) -> list[str]:
    """Words, commands, numbers and symbols, without punctuation and LaTeX that changes only the appearance.

    Symbols count: x + 3 and x - 3 are different questions."""
    plain = _LOOKS.sub(" ", folded(text).replace("dfrac", "frac").replace("tfrac", "frac"))
    return [token for token in _TOKEN.findall(plain) if token not in _STOPS]


def token_key(found: Sequence[str]) -> bytes:
    """16 bytes, equal for texts whose `tokens` are equal however they are spaced: $A B C$ and $ABC$. A space between
    two numbers counts, because 1 2/3 is not 12/3."""
    return blake2b(_BETWEEN_OTHERS.sub("", " ".join(found)).encode(), digest_size=16).digest()


def letters_key(text: str) -> bytes:
    """16 bytes, equal for texts that agree in letters and digits."""
    return blake2b("".join(_WORD.findall(folded(text))).encode(), digest_size=16).digest()


def shingles(found: Sequence[str]) -> frozenset[int]:
    """32-bit hashes of all runs of three tokens; of the whole where there are fewer."""
    if len(found) < SHINGLE_TOKENS:
        return frozenset((zlib.crc32(" ".join(found).encode()),))
    triples = zip(found, found[1:], found[2:], strict=False)
    return frozenset(zlib.crc32(" ".join(triple).encode()) for triple in triples)


def _trimmed(text: str) -> list[str]:
    return [word for piece in folded(text).split() if (word := piece.strip(punctuation))]


READINGS: Mapping[str, Callable[[str], list[str]]] = {
    "letters and digits": lambda text: _WORD.findall(folded(text)),
    "ASCII letters and digits": lambda text: _ASCII_WORD.findall(text.lower()),
    "letters, digits, underscores": lambda text: _MARKED_WORD.findall(folded(text)),
    "punctuation trimmed": _trimmed,
    "punctuation removed": lambda text: folded(text).translate(_REMOVED).split(),
    "white space": lambda text: folded(text).split(),
}
"""Ways to cut a text into words. Published decontaminators differ here and the paper does not name its own, so an
8-gram shared under any of these counts. Not included: every symbol as a separate word, under which `$f(x) = x` is an
8-gram and two in five of all problems overlap."""


def grams(words: Sequence[str]) -> list[tuple[str, ...]]:
    """All runs of eight words, in order, repeats included."""
    return [tuple(words[start : start + GRAM_WORDS]) for start in range(len(words) - GRAM_WORDS + 1)]


BINS = 16
MAX_CANDIDATES = 50  # per question; bounds the work if thousands of exercises share a wording and an answer
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
    """Its answer, as given to `add`."""
    same_answer: bool
    """Whether the two answers have the same form; always so if the texts are only similar."""
    likeness: float
    """Share of shingles in common, 0 to 1; 1.0 for the same text."""
    exact: bool

    @property
    def evidence(self) -> str:
        if self.exact:
            return f"same text as {self.name}"
        return f"{self.likeness:.2f} of the text is that of {self.name}, same answer {self.answer}"


class QuestionIndex(AbstractContextManager["QuestionIndex"]):
    """Every question kept so far, in an SQLite file on disk, so that memory does not grow with their number. Use as a
    context manager; the file is the caller's to delete.

    Near means: at least 0.7 of all three-token shingles of the two are shared (Jaccard), the answers being equal; with
    another answer a similar text is another problem (the same exercise with other numbers). Candidates come from
    one-permutation MinHash: 16 bins, eight bands of two, which finds a pair at 0.7 with a chance of 0.995 and a closer
    one more surely."""

    def __init__(self, file: Path, *, near: float) -> None:
        """near: minimum similarity at which a text with the same answer is a repeat; above 1 finds only equal texts."""
        self._near = near
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(_TABLES)
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("BEGIN")
        self._count = 0

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, question: str, answer: str, name: str, *, form: str) -> Match | None:
        """The earlier question that this one repeats; if None, this one is stored. Order matters: the first is kept.

        form: a normal form of the answer, equal for equal answers. An exact Match may have another one: then one of the
        two labels is wrong."""
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
        first = f"SELECT * FROM (SELECT number FROM band WHERE value = ? ORDER BY number LIMIT {MAX_CANDIDATES})"
        union = " UNION ".join([first] * len(bands))  # a band alone may hold all questions with one wording and answer
        candidates = self._database.execute(
            f"SELECT name, shown, shingles FROM seen WHERE number IN ({union} ORDER BY 1 LIMIT {MAX_CANDIDATES}) "
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
    hashed = (blake2b(f"{pair}{answer}".encode(), digest_size=8) for pair in pairs if pair[1:] != (None, None))
    return [int.from_bytes(one.digest(), "big", signed=True) for one in hashed]


SHOWN_WORDS = 16
_HASH_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    found: Problem
    """The problem of a benchmark whose question shares the most grams."""
    exact: bool
    """The two agree in all letters and digits."""
    passage: str
    """The longest run of words that both have, eight or more; the whole question where `exact`."""
    shared: int
    """Grams shared by both questions, in the reading that found them."""
    total: int
    """Grams of the question in that reading."""

    @property
    def evidence(self) -> str:
        """A description of the overlap for people."""
        if self.exact:
            return f"same question as {self.found.place}"
        words = self.passage.split()
        shown = " ".join(words[:SHOWN_WORDS]) + (" …" if len(words) > SHOWN_WORDS else "")
        run = f"{len(words)} words in a row"
        there = f"are in {self.found.place} too; {self.shared} of {self.total} 8-grams are shared with it"
        return f'{run}, "{shown}", {there}'


class BenchmarkIndex:
    """All 8-grams of all benchmark questions, 12 bytes each: a sorted array of hashes, and beside it the number of a
    question that has the gram.

    A hit is confirmed in the texts, so that a hash collision never drops a row."""

    def __init__(self, questions: Iterable[Problem]) -> None:
        """questions: with the benchmark as `source`, and the line there."""
        self._questions: list[Problem] = []
        self._same: dict[bytes, int] = {}
        first: dict[int, int] = {}
        for number, question in enumerate(questions):
            self._questions.append(question)
            self._same.setdefault(letters_key(question.question), number)
            for read in READINGS.values():
                for gram in grams(read(question.question)):
                    first.setdefault(hash(gram) & _HASH_MASK, number)
        ordered = sorted(first)
        self._hashes = array("Q", ordered)
        self._numbers = array("I", (first[value] for value in ordered))

    def __len__(self) -> int:
        return len(self._questions)

    def find(self, question: str) -> Overlap | None:
        """The overlap with the benchmark question that shares most, or None. Source: paper §5.1 (8-grams); the words of
        a gram are ours, see `READINGS`."""
        same = self._same.get(letters_key(question))
        if same is not None:
            return Overlap(found=self._questions[same], exact=True, passage=question, shared=0, total=0)
        for read in READINGS.values():
            present = grams(read(question))
            hits = [self._numbers[place] for gram in present if (place := self._place(gram)) is not None]
            for number in sorted(set(hits), key=lambda n: (-hits.count(n), n)):
                if overlap := self._confirmed(number, read(self._questions[number].question), present):
                    return overlap
        return None

    def _place(self, gram: tuple[str, ...]) -> int | None:
        value = hash(gram) & _HASH_MASK
        place = bisect_left(self._hashes, value)
        return place if place < len(self._hashes) and self._hashes[place] == value else None

    def _confirmed(self, number: int, words: list[str], present: list[tuple[str, ...]]) -> Overlap | None:
        theirs = set(grams(words))
        starts = [place for place, gram in enumerate(present) if gram in theirs]
        if not starts:
            return None
        return Overlap(
            found=self._questions[number],
            exact=False,
            passage=_longest(present, starts),
            shared=len(starts),
            total=len(present),
        )

    def sizes(self) -> Counter[str]:
        """Questions per benchmark."""
        return Counter(question.source for question in self._questions)


def _longest(present: Sequence[tuple[str, ...]], starts: Sequence[int]) -> str:
    """The words of the longest run of grams that follow one another; starts: places of the shared grams, ascending."""
    best = first = last = starts[0]
    length = 1
    for start in starts[1:]:
        first = first if start == last + 1 else start
        last = start
        if last - first + 1 > length:
            best, length = first, last - first + 1
    return " ".join((*present[best], *(gram[-1] for gram in present[best + 1 : best + length])))
