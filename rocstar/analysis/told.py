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

_PART = re.compile(r"\w+|\s+|[^\w\s]+")


class Told(StrEnum):
    TRUE = "true"
    SWAPPED = "swapped"
    BLANK = "blank"
    FALSE = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Falsehood:
    text: str
    true_word: str
    false_word: str
    """What stands in the text in its place."""


class Replies:
    """What tools said in a set of attempts."""

    def __init__(self, said: Iterable[tuple[bool, str]]) -> None:
        """said: (whether the call failed, the reply)."""
        self._alike: dict[bool, list[str]] = defaultdict(list)
        self._of_length: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for failed, text in said:
            parts = tuple(_PART.findall(text))
            self._alike[failed].append(text)
            self._of_length[len(parts)].add(parts)

    def another(self, failed: bool, text: str, rng: random.Random) -> str | None:
        """What was said after another call that ended alike, as often as it was said; None where that is always the
        same."""
        others = [other for other in self._alike[failed] if other != text]
        return rng.choice(others) if others else None

    def false(self, text: str, read: str, rng: random.Random) -> Falsehood | None:
        """With a word that stands neither in the text nor in `read`, which is all that the attempt has read and written
        before; None where there is nothing to replace."""
        parts = _PART.findall(text)
        known = {*parts, *_PART.findall(read)}
        others = sorted(self._of_length[len(parts)])
        found = [(place, other[place]) for other in others if (place := _only_difference(parts, other)) is not None]
        for some in (found, _last_number(parts, rng)):
            if new := [(place, word) for place, word in some if word.isalnum() and word not in known]:
                place, word = rng.choice(new)
                changed = "".join([*parts[:place], word, *parts[place + 1 :]])
                return Falsehood(text=changed, true_word=parts[place], false_word=word)
        return None


def holds(text: str, word: str) -> bool:
    """Whether the word stands in the text as a whole word."""
    return word in _PART.findall(text)


def _only_difference(parts: Sequence[str], other: Sequence[str]) -> int | None:
    places = [place for place, (ours, theirs) in enumerate(zip(parts, other, strict=True)) if ours != theirs]
    return places[0] if len(places) == 1 else None


def _last_number(parts: Sequence[str], rng: random.Random) -> list[tuple[int, str]]:
    places = [place for place, part in enumerate(parts) if part.isascii() and part.isdigit()]
    return [(place, "".join(rng.choice("123456789") for _ in parts[place])) for place in places[-1:]]
