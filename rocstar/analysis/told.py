"""Other texts for a tool's reply, to see whether a model reads it (swap.py). Pure.

true      what the tool said
swapped   what a tool said in another attempt, after a call that ended alike (failed, or not)
blank     nothing
false     what the tool said but for one word: another reply's, else another number of as many digits
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

MOST_WORDS = 64  # of a reply that others are compared with word by word
_PART = re.compile(r"\w+|\s+|[^\w\s]+")


class Told(StrEnum):
    TRUE = "true"
    SWAPPED = "swapped"
    BLANK = "blank"
    FALSE = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsehood:
    """A reply with one word of it replaced."""

    text: str
    true_word: str
    false_word: str


class Replies:
    """What tools said in a set of attempts."""

    def __init__(self, texts: Iterable[tuple[bool, str]]) -> None:
        """texts: (whether the call failed, what was said)."""
        self._alike: dict[bool, set[str]] = defaultdict(set)
        self._words: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for failed, text in texts:
            self._alike[failed].add(text)
            for masked, word in _masked(text):
                self._words[masked].add(word)

    def another(self, failed: bool, text: str, rng: random.Random) -> str | None:
        """What was said after another call that ended alike; None where that is always the same."""
        others = sorted(self._alike[failed] - {text})
        return rng.choice(others) if others else None

    def false(self, text: str, written: str, rng: random.Random) -> Falsehood | None:
        """The text with one word replaced by one that stands neither in it nor in `written`, which is all that the
        attempt has read and written before; None where there is nothing to replace."""
        taken = set(_PART.findall(f"{text} {written}"))
        parts = _PART.findall(text)
        found = [
            (place, word)
            for place, (masked, _) in enumerate(_masked(text))
            for word in sorted(self._words[masked] - taken)
            if re.fullmatch(r"\w+", word)
        ]
        found = found or [(place, word) for place, word in _numbers(parts, rng) if word not in taken]
        if not found:
            return None
        place, word = rng.choice(found)
        changed = "".join([*parts[:place], word, *parts[place + 1 :]])
        return Falsehood(text=changed, true_word=parts[place], false_word=word)


def holds(text: str, word: str) -> bool:
    """Whether the word stands in the text as a whole word."""
    return word in _PART.findall(text)


def _masked(text: str) -> list[tuple[tuple[str, ...], str]]:
    """For each part of a text: all of it without that part, and the part. Empty for a long text."""
    parts = _PART.findall(text)
    if len(parts) > MOST_WORDS:
        return []
    return [((*parts[:place], "\0", *parts[place + 1 :]), part) for place, part in enumerate(parts)]


def _numbers(parts: Sequence[str], rng: random.Random) -> list[tuple[int, str]]:
    """The place of the last number, and another of as many digits."""
    places = [place for place, part in enumerate(parts) if part.isascii() and part.isdigit()]
    return [(place, "".join(rng.choice("123456789") for _ in parts[place])) for place in places[-1:]]
