"""Files of cases (a text, its reference, perhaps an expected verdict) and the table of verdicts.

Used by `rocstar verify`, `rocstar reward test` and the benchmarks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rocstar.answers.extract import boxed_answer, lenient_answer, strict_answer
from rocstar.answers.grade import Grader, Pair
from rocstar.errors import DataError
from rocstar.types import Verdict

ROLES = {"text": "what a model wrote", "gold": "the reference"}
SHOWN_CHARS = 44
MANY = 1e9  # larger numbers are shown by their power of ten
MAX_ERROR_CHARS = 400  # of a function's exception
YES, NO = (True, 1, "right", "true", "correct", "yes", "1"), (False, 0, "wrong", "false", "incorrect", "no", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    line: int
    """Its line in the file, counted from 1."""
    text: str
    """A model's text, or just an answer."""
    gold: str
    """The reference; of a whole transcript, its box counts."""
    expected: Verdict | float | None = None
    """The expected verdict or reward; None if there is none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""


def load_cases(
    path: str | Path,
    rows: Iterable[tuple[int, Any]],
    *,
    text: str = "text",
    gold: str = "gold",
    expected: str | None = None,
    limit: int | None = None,
    graded: bool = False,
) -> list[Case]:
    """The cases of a file, in its order. rows: (line, row), as `data.rows.read_rows` gives them. text, gold, expected:
    column names. limit: read only the first so many. graded: rows need no reference (gold "") and if any expected value
    is a reward, such as 0.5, and not a verdict, all are rewards. Raises DataError naming file, line and field."""
    file = Path(path)
    cases = []
    for line, row in islice(rows, limit):
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {line}: expected a JSON object, got {type(row).__name__}.")
        expected_value = None if expected is None else _expected(file, line, row, expected, graded)
        cases.append(
            Case(
                line=line,
                text=_text(file, line, row, text, "text"),
                gold=_text(file, line, row, gold, "gold") if gold or not graded else "",
                expected=expected_value,
                columns=row,
            )
        )
    if not cases:
        raise DataError(f"{file} has no rows; give one JSON object a line.")
    if not any(isinstance(case.expected, float) for case in cases):
        return cases
    return [
        replace(case, expected=float(case.expected is Verdict.RIGHT)) if isinstance(case.expected, Verdict) else case
        for case in cases
    ]


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The assistant's text: the text itself, or the assistant's messages of a conversation; never a tool's."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message.get("content") or "") for message in completion if message.get("role") == "assistant")


def pair_of(case: Case, *, strict: bool = False) -> Pair:
    """The pair to compare. Strict: the box inside the answer block. Otherwise the last box, or a final answer announced
    after it; without any, an announced answer, else the whole text."""
    boxed_gold = boxed_answer(case.gold)
    gold = case.gold if boxed_gold is None else boxed_gold
    if strict:
        return Pair(gold=gold, predicted=strict_answer(case.text))
    found = lenient_answer(case.text)
    return Pair(gold=gold, predicted=case.text if found is None else found)


async def decide(grader: Grader, cases: Iterable[Case], *, strict: bool = False) -> list[dict[str, Any]]:
    """Decide the cases one by one, to time each separately: wall time of extraction and comparison. Returns a row for
    each, for `--json` and the table; `extracted` is the answer found in the text. Raises VerifierUnavailable."""
    rows = []
    for case in cases:
        started = time.perf_counter()
        (given,) = await grader.grade_all([pair_of(case, strict=strict)])
        row = {
            "line": case.line,
            "text": case.text,
            "gold": case.gold,
            "extracted": given.extracted,
            "verdict": str(given.verdict),
            "method": given.method,
            "milliseconds": round(1000 * (time.perf_counter() - started), 3),
        }
        rows.append(row if case.expected is None else {**row, "expected": str(case.expected)})
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by verdict and method, milliseconds, and agreement with expected values, of the rows of `decide`."""
    times = sorted(row["milliseconds"] for row in rows)
    return {
        "cases": len(rows),
        **{str(verdict): sum(row["verdict"] == verdict for row in rows) for verdict in Verdict},
        "methods": dict(Counter(row["method"] for row in rows).most_common()),
        "milliseconds_median": times[len(times) // 2] if times else None,
        "milliseconds_max": times[-1] if times else None,
        **agreement([(row["verdict"], row.get("expected")) for row in rows]),
    }


def agreement(pairs: Iterable[tuple[str | float, str | float | None]]) -> dict[str, Any]:
    """How often verdicts agree with the expected ones; empty if none are expected."""
    agreed = [found == expected for found, expected in pairs if expected is not None]
    share = {"expected": len(agreed), "agreed": sum(agreed), "agreement": round(sum(agreed) / max(1, len(agreed)), 4)}
    return share if agreed else {}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text; a long cell is cut at the front, since answers stand at the end; an error is never cut."""
    chars = [MAX_ERROR_CHARS if column == "error" else SHOWN_CHARS for column in columns]
    cells = ([short(row.get(column, ""), most) for column, most in zip(columns, chars, strict=True)] for row in rows)
    lines = [list(columns), *cells]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in aligned)


def short(value: Any, most: int = SHOWN_CHARS) -> str:
    """One line of at most so many characters that any terminal can show."""
    number = "{:.3f}" if isinstance(value, float) and abs(value) < MANY else "{:.4g}"  # 1e300 has 301 digits
    text = number.format(value) if isinstance(value, float) else "-" if value is None else str(value)
    text = " ".join(text.split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else "..." + text[-(most - 3) :]


def _text(file: Path, line: int, row: Mapping[str, Any], name: str, option: str) -> str:
    none = ', or give reward test --gold "" where a function reads other columns' * (option == "gold")
    if name not in row:
        there = f"no column {name!r}, {ROLES[option]}, among {', '.join(row)}"
        raise DataError(f"{file}, line {line}: {there}; name it with --{option}{none}.")
    value = row[name]
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        value = completion_text(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        wrong = f"expected text or a number, got {type(value).__name__}"
        raise DataError(f"{file}, line {line}, field {name!r}: {wrong}; name another column with --{option}{none}.")
    return str(value)


def _expected(file: Path, line: int, row: Mapping[str, Any], name: str, graded: bool) -> Verdict | float:
    value = row.get(name)
    plain = value.strip().lower() if isinstance(value, str) else value
    if plain in YES:
        return Verdict.RIGHT
    if plain in NO:
        return Verdict.WRONG
    if graded and isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    kinds = "true, false or a reward" if graded else "true or false"
    raise DataError(f"{file}, line {line}, field {name!r}: expected {kinds}, got {value!r}.")
