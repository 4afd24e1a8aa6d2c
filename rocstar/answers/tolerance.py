"""Compare numbers within the absolute tolerances that a source publishes with an answer (OlympiadBench does).

Not here: any tolerance of our own. Without a published one numbers are compared exactly (`numbers.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from rocstar.answers.numbers import PlainNumber, parse_number
from rocstar.answers.pieces import take_apart
from rocstar.types import Verdict

MAX_ITEMS = 60  # of a list; finding partners takes more than the square of it


def parse_tolerance(written: object) -> tuple[Fraction, ...]:
    """A number, a text as `1e-3` or `1e34, 1e-3`, or a list of these; none and an empty text are no tolerance.

    Raises ValueError for anything else, OverflowError for an integer beyond any float."""
    if written is None or written == "":
        return ()
    parts = written.split(",") if isinstance(written, str) else written if isinstance(written, list) else [written]
    found = [_number(part) for part in parts]
    if not all(math.isfinite(one) and one >= 0 for one in found):
        raise ValueError("below 0 or not finite")
    return tuple(Fraction(repr(one)) for one in found)  # as written: 1e-3 is one thousandth


def _number(part: object) -> float:
    if isinstance(part, bool) or not isinstance(part, str | int | float):
        raise ValueError("not a number")
    return float(part)


def compare_within(gold: str, predicted: str, tolerance: Sequence[Fraction]) -> tuple[Verdict, str] | None:
    """(verdict, method) for a number or a list of numbers; None where a part is no plain number or units differ.

    tolerance: one for all numbers of the reference, or one for each, in its order. A bare list and a set need not keep
    their order. Source: OlympiadBench's judge, which compares absolutely."""
    wanted, given = _numbers(gold), _numbers(predicted)
    if wanted is None or given is None or len(tolerance) not in (1, len(wanted[1])):
        return None
    bounds = list(tolerance) * (len(wanted[1]) if len(tolerance) == 1 else 1)
    (shape, golds), (other, found) = wanted, given
    if len({number.unit for number in (*golds, *found)} - {""}) > 1:
        return None
    if len(golds) != len(found) or shape != other:
        return Verdict.WRONG, "tolerance"
    fits = [[abs(a.value - b.value) <= bound for b in found] for a, bound in zip(golds, bounds, strict=True)]
    same = _partners(fits) if shape == "" else all(row[place] for place, row in enumerate(fits))
    return (Verdict.RIGHT if same else Verdict.WRONG), "tolerance"


def _numbers(text: str) -> tuple[str, list[PlainNumber]] | None:
    """(brackets, the numbers in them); brackets are "" for one number, a bare list and a set."""
    pieces = None if parse_number(text) else take_apart(text)
    items = pieces.items if pieces else (text,)
    numbers = [parse_number(item) for item in items]
    known = [number for number in numbers if number is not None and not number.percent and not number.base]
    if len(known) != len(items) or len(items) > MAX_ITEMS:
        return None
    return (pieces.opening + pieces.closing if pieces and pieces.is_ordered else ""), known


def _partners(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row finds a column of its own; a row that takes another's column moves that one on."""
    taken: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in taken or place(taken[column], tried):
                    taken[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))
