"""math-verify as a grader. Runs in the worker processes only: it loads sympy and has no bound on its time.

Whether two answers *should* count as equal is the library's business; which texts it may read is decided here.
"""

from __future__ import annotations

from typing import Any

from rocstar.answers.wording import named_primes, undelimited
from rocstar.types import Verdict

METHOD = "math_verify"
NOWHERE, LATEX, ANYWHERE = "", "latex", "all"
"""Where an answer may be searched: the text is the answer; formulas in a running text; bare numbers as well."""

_FORMULA = ("$", "\\(", "\\[", "\\boxed")


def grade_math_verify(
    gold: str, predicted: str, *, search: str = NOWHERE, any_names: bool = False
) -> tuple[Verdict, str]:
    """(verdict, method): RIGHT or WRONG; UNDECIDED when the reference cannot be read and the two texts do not come out
    equal. A prediction that cannot be read is WRONG. `any_names`: names of variables do not matter, so f(x)
    is f(y). Unbounded in time."""
    from math_verify import verify

    wanted = _parse(gold, LATEX if search and any(mark in gold for mark in _FORMULA) else NOWHERE)
    given = _parse(predicted, search)
    if verify(wanted, given, strict=not any_names, timeout_seconds=None):
        return Verdict.RIGHT, METHOD
    unread = all(isinstance(part, str) for part in wanted)
    return (Verdict.UNDECIDED, "gold_unparsed") if unread else (Verdict.WRONG, METHOD)


def _parse(text: str, search: str) -> list[Any]:
    """The library's reading of a text. Without `search` it must parse as LaTeX in whole: the library otherwise takes
    the last formula it finds, and then the last number, so that `3 or $5$` and `1 + \\foo{ 5` would pass for 5."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = text if search else named_primes(undelimited(text))
    delimited = any(mark in text for mark in _FORMULA)
    kinds = [LatexExtractionConfig()]
    if search == ANYWHERE:
        kinds.append(ExprExtractionConfig())
    parsed: list[Any] = parse(text if delimited else f"${text}$", kinds, parsing_timeout=None)
    return parsed
