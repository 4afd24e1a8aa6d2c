"""How questions are compared: keys for equal texts, shingles for nearly equal ones, readings for 8-gram overlap.

Not here: what is done with a match (`duplicates.py`, `decontamination.py`).
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from string import punctuation

GRAM_WORDS = 8
"""Words in a gram; the paper drops what shares one with a benchmark (§5.1)."""
SHINGLE_TOKENS = 3

# What changes only the looks of LaTeX: delimiters of mathematics, spacing, fonts, braces.
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
    """Lower case, with characters that only look different (full-width, ligatures, styled letters) made one and those
    that nobody sees left out."""
    return (text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_UNSEEN)).lower()


def tokens(text: str) -> list[str]:
    """Words, commands, numbers and symbols without LaTeX that changes only the looks and without punctuation.

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
"""Ways to cut a text into words. Published decontaminators differ here and nobody says which the paper used, so an
8-gram shared under any of these counts. Not among them: every symbol a word of its own, under which `$f(x) = x` is an
8-gram and two in five of all problems overlap."""


def grams(words: Sequence[str]) -> list[tuple[str, ...]]:
    """All runs of eight words, in order, repeats included."""
    return [tuple(words[start : start + GRAM_WORDS]) for start in range(len(words) - GRAM_WORDS + 1)]
