"""Limits checked before parsing: texts so long, so deep or so large in value that parsing them is a risk.

A scan over a text of limited length. It stops the usual explosions cheaply; the rest is stopped by the deadline and
memory limit of `symbolic.py`, so it need not be complete.
"""

from __future__ import annotations

import re

MAX_CHARS = 1000  # one of 58,000 references is longer; parsers are slow. Source: release, which cuts predictions there
MAX_DEPTH = 40  # brackets inside brackets; published references stay below ten
MAX_DIGITS = 20_000  # of an integer that a parser would evaluate, some milliseconds; references reach 6,000
MAX_FACTORIAL = 5000  # 5000! has 16,326 digits; references like years, 2022!

PLAIN = "0"
"""A trivial prediction: the cost of comparing a reference with it is the cost of the reference."""

_BRACKET = re.compile(r"\\[{}]|[(\[{]|[)\]}]")
_OPENING = frozenset(("(", "[", "{", "\\{"))
_POWER = re.compile(r"(\d+(?:\.\d+)?)[\s)}\]]*\^\s*(?:\{\s*(-?\d+)\s*\}|\(\s*(-?\d+)\s*\)|(-?\d))")
_BIG_EXPONENT = re.compile(r"\^\s*(?:\d{5}|[{(][^{}()]*\d{5})")
_TOWER = re.compile(r"\d[\s)}\]]*\^[\s({]*\d+(?:\.\d+)?[\s)}\]]*\^[\s({]*\d+[\s)}\]]*(?P<third>\^)?")
_TOWER_NUMBERS = re.compile(r"\d+")
_FACTORIAL = re.compile(r"(\d+)[\s)}\]]*!")
_FACTORIAL_TWICE = re.compile(r"(\d+)[\s)}\]]*![\s)}\]]+!|\^[\s({]*\d+[\s)}\]]*!")


def refusal(text: str) -> str | None:
    """Why a text must not be parsed: `too_long`, `too_deep`, `too_big`; None when it may be."""
    if len(text) > MAX_CHARS:
        return "too_long"
    if _depth(text) > MAX_DEPTH:
        return "too_deep"
    return "too_big" if _is_big(text) else None


def _depth(text: str) -> int:
    deepest = depth = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in _OPENING else -1
        depth = max(depth, 0)
        deepest = max(deepest, depth)
    return deepest


def _is_big(text: str) -> bool:
    """An integer of more than MAX_DIGITS digits is written as a power or a factorial of plain numbers, or an exponent
    holds a number of five digits."""
    if "^" in text:
        if _BIG_EXPONENT.search(text):
            return True
        if any(_digits(found[1], found[2] or found[3] or found[4]) > MAX_DIGITS for found in _POWER.finditer(text)):
            return True
        if any(_is_big_tower(found) for found in _TOWER.finditer(text)):
            return True
    if "!" in text:
        if any(len(found[1]) > 4 or int(found[1]) > MAX_FACTORIAL for found in _FACTORIAL.finditer(text)):
            return True
        return any(found[1] is None or int(found[1]) > 6 for found in _FACTORIAL_TWICE.finditer(text))
    return False


def _digits(base: str, exponent: str) -> float:
    """An upper bound on the digits of base ** exponent."""
    if len(exponent) > 6:
        return float("inf")
    return len(base) * abs(int(exponent))


def _is_big_tower(found: re.Match[str]) -> bool:
    """a^b^c with b^c over MAX_DIGITS, or a fourth level."""
    numbers = _TOWER_NUMBERS.findall(found[0])
    if found["third"] or any(len(number) > 6 for number in numbers[-2:]):
        return True
    middle, top = int(numbers[-2]), int(numbers[-1])
    return middle > 1 and (top > 12 or middle**top > MAX_DIGITS)
