"""Find questions that share text with a benchmark: the same question, or any 8-gram in common.

Not covered: paraphrases and translations, and benchmark questions of fewer than eight words beyond the same text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocstar.data.pool.text import READINGS, grams, letters_key

STOCK_QUESTIONS = 10
"""An 8-gram that stands in so many different questions of the sources is a stock phrase."""
SHOWN_WORDS = 16
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
    passage: str
    """The longest run of words that both have, eight or more; the whole question where `exact`."""
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
        words = self.passage.split()
        shown = " ".join(words[:SHOWN_WORDS]) + (" …" if len(words) > SHOWN_WORDS else "")
        run = f"{len(words)} words in a row"
        return f'{run}, "{shown}", are in {place} too; {self.shared} of {self.total} 8-grams are shared with it'


class BenchmarkIndex:
    """All 8-grams of all benchmark questions, 16 bytes each: a sorted array of hashes, and beside it the number of a
    question that has the gram and how many counted questions have it.

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
        self._uses = array("I", bytes(4 * len(ordered)))

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

    def count(self, question: str) -> None:
        """Take note that one more question of the sources has the 8-grams of this one. Call it once for each."""
        for place in self._places(question):
            self._uses[place] += 1

    def rarest(self, question: str) -> int:
        """In how many counted questions the rarest of its shared 8-grams stands; 0 where it shares none."""
        return min((self._uses[place] for place in self._places(question)), default=0)

    def _places(self, question: str) -> set[int]:
        """Where its shared 8-grams stand in the index, in all readings."""
        return {
            place
            for read in READINGS.values()
            for gram in grams(read(question))
            if (place := self._place(gram)) is not None
        }

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
        return Counter(question.benchmark for question in self._questions)


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
