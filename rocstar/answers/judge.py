"""The function of the worker processes: one pair of answers, the symbolic graders in order, one verdict.

Imported by the workers; the parent only names it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rocstar.answers.caps import MAX_DIGITS, PLAIN
from rocstar.answers.pieces import beside_bounds
from rocstar.answers.prime import grade_prime, same_text
from rocstar.answers.text import is_words
from rocstar.answers.wording import ABROAD, HEDGE, named_primes, undelimited
from rocstar.types import Verdict

# math-verify as a grader. The library decides whether two answers count as equal; this file decides which texts it
# may read.

METHOD = "math_verify"


def grade_math_verify(gold: str, predicted: str, *, any_names: bool = False) -> tuple[Verdict, str]:
    """(verdict, method): RIGHT or WRONG; UNDECIDED if the reference cannot be read and the two texts are not found
    equal. A prediction that cannot be read is WRONG. `any_names`: names of variables do not matter, so f(x) is f(y).
    Unbounded in time."""
    parsed_gold = _read(gold)
    # A set may be written as a relation, 1 < x < 2 for (1, 2), by either side.
    if verify(parsed_gold, _read(predicted), strict=not any_names, allow_set_relation_comp=True, timeout_seconds=None):
        return Verdict.RIGHT, METHOD
    unread = all(isinstance(part, str) for part in parsed_gold)
    return (Verdict.UNDECIDED, "gold_unparsed") if unread else (Verdict.WRONG, METHOD)


def _read(text: str) -> list[Any]:
    """Parse a text that must be LaTeX as a whole: otherwise the library takes the last formula, line or number, so that
    `3 or $5$`, `1 + \\foo{ 5` and a 5 on a line of its own would pass for 5."""
    formula = f"${' '.join(named_primes(undelimited(text)).split())}$"
    parsed: list[Any] = parse(formula, [LatexExtractionConfig()], parsing_timeout=None)
    return parsed


# The graders together

Found = tuple[Verdict, str]
# The grammar reads gcd(n, p-1) as 1 and `1 2` as 3, and drops a \not; equal results for such texts mean nothing.
LOSSY = re.compile(r"\\not(?![A-Za-z])|\b(?:gcd|lcm)\b|(?<![\w^.}])\d+\s+(?!\d{3}(?!\d))\d(?!\d*\s*/)")
FINAL = ("value", "unit", "brackets", "names")  # the other graders are not asked
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
# Text that the grammar drops though it changes the answer: a number or another value follows, an ellipsis rounds a
# decimal; "or" alone makes a list. How far a number is rounded changes nothing.
_AFTER = r"[\d)}\]]\s*\\(?:text\w*|math\w+|mbox)\s*\{"
BOUND = re.compile(
    rf"\\(?:text\w*|math\w+|mbox)\s*\{{(?![\s,;]*or\s*\}})[^{{}}]*\b(?:{HEDGE}|or)\b"
    r"|\\text\{\s*(?:to|[-/;:|~]+)\s*\}|[)\]}]'+$"
    rf"|{_AFTER}[^{{}}]*(?<![A-Za-z^\d-])\d(?!\d* ?(?:s\.?\s?f|d\.?\s?p|sig|dec))"
    rf"|{_AFTER}(?!\s*(?:and|or)\s*\}})[^{{}}]*[A-Za-z]\W?[A-Za-z][^{{}}]*\}}\s*(?:\d|\\frac|\\sqrt)"
    r"|(?:\d\}?|\\text\{[^{}]*\})_(?:\{[^{}]*[^\d{}()\s]|[A-Za-z])"
    r"|(?:^|[^.\d])\d*\s*(?:\\[lcd]?dots(?![A-Za-z])|\.{3})"
)
_ABROAD = re.compile(rf"\\(?:text\w*|math\w+|mbox)\s*\{{[^{{}}]*(?:{ABROAD})")
_ENDLESS = re.compile(r"[,+]\s*(?:\\[lcv]?dots(?![A-Za-z])|\.{3})")
_BASED = re.compile(r"(?<![A-Za-z])(\d[\dA-F]*)\s*_\s*\{?\s*\(?\s*(-?\d+)")
_VARIABLE = re.compile(r"[\d})]([A-Za-z])$")
_END_LETTERS = re.compile(r"(?<=[\d\s})])[A-Za-z]+$")
GRADERS: dict[str, Callable[..., Found]] = {
    "prime": grade_prime,
    "math_verify": grade_math_verify,
    "math_verify_any_names": partial(grade_math_verify, any_names=True),
}


def judge(question: Mapping[str, Any]) -> Found:
    """(verdict, method) of the named graders together; the question is a `symbolic.Question` as JSON. The first that
    accepts decides, as in the release. If no grader decides, the verdict is WRONG if the reference can be compared at
    all: then the prediction is unreadable. Unbounded in time. Raises MemoryError."""
    found, graders, gold = _attempted(**question), question["graders"], question["gold"]
    if found[0] is not Verdict.UNDECIDED or LOSSY.search(gold):
        return found
    # Whether it can be compared with a plain number; words always can, though a parser rejects `true`.
    readable = is_words(gold) or _attempted(graders, gold, PLAIN)[0] is not Verdict.UNDECIDED
    return (Verdict.WRONG, "unreadable") if readable else found


def _attempted(graders: Sequence[str], gold: str, predicted: str) -> Found:
    try:
        return fused(graders, gold, predicted)
    except MemoryError:
        raise
    except Exception:  # parsers and sympy may raise anything for texts that are not formulas
        return Verdict.UNDECIDED, "unreadable"


def fused(graders: Sequence[str], gold: str, predicted: str) -> Found:
    """RIGHT by the first that accepts; WRONG at once for numbers, units or brackets that differ, else when one rejects
    and none accepts; UNDECIDED if none can read the reference, or the parser would lose a part of either text."""
    last: Found = (Verdict.UNDECIDED, "unsure")
    lossy = LOSSY.search(gold) or LOSSY.search(predicted) or (BOUND.search(predicted) and not BOUND.search(gold))
    lossy = lossy or any(bool(sign.search(gold)) != bool(sign.search(predicted)) for sign in (_ABROAD, _ENDLESS))
    if lossy:
        return (Verdict.RIGHT, "prime") if same_text(gold, predicted) else last
    gold, predicted = beside_bounds(gold, predicted), beside_bounds(predicted, gold)
    if "math_verify_any_names" not in graders and _differ_in_letters(gold, predicted):
        graders = [name for name in graders if name != "math_verify"] or graders
    for name in graders:
        verdict, method = GRADERS[name](gold, predicted)
        if verdict is Verdict.RIGHT or method in FINAL:
            return verdict, method
        if verdict is Verdict.WRONG or last[0] is Verdict.UNDECIDED:
            last = verdict, method
    return last


def _differ_in_letters(gold: str, predicted: str) -> bool:
    """Whether the texts differ in bases or letters that math-verify ignores: in case, as x and X, or in those at their
    ends, as 5m and 5s, which it drops where they may be units. A reference `5m` is a product: of 59,000 published
    references not one has a unit like that."""
    bases = [sorted(_BASED.findall(text)) for text in (gold, predicted)]
    if all(bases) and bases[0] != bases[1]:
        return True
    ours, others = (set(_LETTERS.findall(text)) for text in (gold, predicted))
    if any(one != name and one.lower() == name.lower() for name in ours ^ others for one in ours | others):
        return True
    ends = [_END_LETTERS.findall(undelimited(text)) for text in (gold, predicted)]
    variable = _VARIABLE.search(undelimited(gold))
    return (all(ends) and ends[0] != ends[1]) or bool(variable and variable[1] not in others)


def warm() -> None:
    """Build the grammars and patterns of the libraries and silence their logs, before any clock runs."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(2 * MAX_DIGITS)  # 2022! is a reference, and libraries print what they compare
    grade_math_verify("$\\frac{1}{2}+x$", "x+0.5")
    grade_prime("(1, x+1)", "(1, 1+x)")
