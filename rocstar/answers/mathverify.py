"""math-verify as a grader. Runs in the worker processes only: it loads sympy and has no bound on its time.

Whether two answers *should* count as equal is the library's business; which texts it may read is decided here.
"""

from __future__ import annotations

from typing import Any

from rocstar.answers.wording import is_running, named_primes, undelimited
from rocstar.types import Verdict

METHOD = "math_verify"
LATEX, ANYTHING = "latex", "all"
"""What may be taken from a running text: formulas; bare numbers as well."""


def grade_math_verify(
    gold: str, predicted: str, *, said: str = "", search: str = ANYTHING, any_names: bool = False
) -> tuple[Verdict, str]:
    """(verdict, method): RIGHT or WRONG; UNDECIDED when the reference cannot be read and the two texts do not come out
    equal. A prediction that cannot be read is WRONG. `said`: running text, searched by the library's own rules as well.
    `any_names`: names of variables do not matter, so f(x) is f(y). Unbounded in time."""
    from math_verify import verify

    wanted = _search(gold, search) if said and is_running(gold) else _read(gold)
    given = [*_read(predicted), *(_search(said, search) if said else [])]
    # A set may be written as a relation, 1 < x < 2 for (1, 2), by either side.
    if verify(wanted, given, strict=not any_names, allow_set_relation_comp=True, timeout_seconds=None):
        return Verdict.RIGHT, METHOD
    unread = all(isinstance(part, str) for part in wanted)
    return (Verdict.UNDECIDED, "gold_unparsed") if unread else (Verdict.WRONG, METHOD)


def _read(text: str) -> list[Any]:
    """A text that must parse as LaTeX in whole: the library otherwise takes the last formula it finds, and then the
    last number, so that `3 or $5$` and `1 + \\foo{ 5` would pass for 5."""
    return _search(f"${named_primes(undelimited(text))}$", LATEX)


def _search(text: str, search: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = [LatexExtractionConfig(), *([ExprExtractionConfig()] if search == ANYTHING else [])]
    parsed: list[Any] = parse(text, kinds, parsing_timeout=None)
    return parsed
