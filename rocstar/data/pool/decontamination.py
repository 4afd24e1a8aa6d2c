"""Find questions that share text with a benchmark: the same question, or any 8-gram in common.

Not covered: paraphrases and translations, and benchmark questions of fewer than eight words beyond the same text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rocstar.data.pool.text import READINGS, grams, letters_key

_HASH_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkQuestion:
    benchmark: str
    """Name of the benchmark."""
    line: int
    """Its line or row there, counted from 1."""
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    found: BenchmarkQuestion
    """The benchmark question that shares most grams."""
    exact: bool
    """The two agree in all letters and digits."""
    gram: str
    """One shared 8-gram; the whole question where `exact`."""
    shared: int
    """Grams of the question that the benchmark question has too, in the reading that found it."""
    total: int
    """Grams of the question in that reading."""

    @property
    def evidence(self) -> str:
        """For a person: what is shared with what."""
        place = f"{self.found.benchmark} line {self.found.line}"
        if self.exact:
            return f"same question as {place}"
        return f'"{self.gram}" is in {place} too; {self.shared} of {self.total} 8-grams are shared with it'


class BenchmarkIndex:
    """All 8-grams of all benchmark questions, 12 bytes each: a sorted array of hashes beside one of question numbers.

    A hit is confirmed in the texts, so that a hash collision never drops a row."""

    def __init__(self, questions: Iterable[BenchmarkQuestion]) -> None:
        self._questions: list[BenchmarkQuestion] = []
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
            return Overlap(found=self._questions[same], exact=True, gram=question, shared=0, total=0)
        for read in READINGS.values():
            present = grams(read(question))
            hits = [number for gram in present if (number := self._lookup(gram)) is not None]
            for number in sorted(set(hits), key=lambda n: (-hits.count(n), n)):
                if overlap := self._confirmed(number, read(self._questions[number].question), present):
                    return overlap
        return None

    def _lookup(self, gram: tuple[str, ...]) -> int | None:
        value = hash(gram) & _HASH_MASK
        place = bisect_left(self._hashes, value)
        if place < len(self._hashes) and self._hashes[place] == value:
            return self._numbers[place]
        return None

    def _confirmed(self, number: int, words: list[str], present: list[tuple[str, ...]]) -> Overlap | None:
        theirs = set(grams(words))
        shared = [gram for gram in present if gram in theirs]
        if not shared:
            return None
        return Overlap(
            found=self._questions[number],
            exact=False,
            gram=" ".join(shared[0]),
            shared=len(shared),
            total=len(present),
        )

    def sizes(self) -> Counter[str]:
        """Questions per benchmark."""
        return Counter(question.benchmark for question in self._questions)
