"""Read the problems of a file. No download, no shuffling, no filtering.

Published files are read as they are, by naming the columns or by recognising the layout (`layouts.py`); kinds of files
are in `rows.py`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocstar.data.layouts import (
    ANSWER_SYNONYMS,
    LAYOUTS,
    QUESTION_SYNONYMS,
    Columns,
    Row,
    as_written,
    detect_columns,
    problem_of,
    with_story,
)
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Problem


def load_problems(
    path: str | Path,
    *,
    question: str | Sequence[str] = "question",
    answer: str = "answer",
    source: str | None = None,
    limit: int | None = None,
) -> list[Problem]:
    """The problems of a file, in its order.

    question, answer: column names; several for the question are joined by a space. Where a default one is absent and
    exactly one usual synonym is there, if need be in other capitals, that is used, after the story that it asks about
    where there is one (SVAMP's `Body`), and rows in the layout of TRL, verl, SkyRL or slime are recognised. source:
    recorded with each problem, default the file's name. limit: read only the first so many rows. Numbers count as
    answers and become text (8.0 becomes "8"); every other column goes into `metadata`, with the line (parquet: the
    row) counted from 1 as "line".
    Raises DataError naming file, line and field. Source: ours."""
    name = source or Path(path).name
    asked = (question,) if isinstance(question, str) else tuple(question)
    problems: list[Problem] = []
    for line, row in itertools.islice(read_rows(path), limit):
        where = f"{path}, line {line}"
        columns = columns_of(row, where, asked, answer)
        problems.append(problem_of(row, columns, where=where, source=name, line=line))
    if not problems and limit != 0:
        raise DataError(f"{path} has no rows; give a file with at least one problem.")
    return problems


def columns_of(row: Any, where: str, question: tuple[str, ...], answer: str) -> Columns:
    """The columns of a row that are read when these are asked for. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected one JSON object with columns, got {as_written(row)}.")
    by_default = question == ("question",)
    if by_default and answer == "answer" and _is_foreign(row):
        return detect_columns(row, where=where)
    asked = tuple(_column(row, where, "question", name, QUESTION_SYNONYMS) for name in question)
    answered = _column(row, where, "answer", answer, ANSWER_SYNONYMS)
    return Columns(layout="given", question=with_story(row, *asked) if by_default else asked, answer=answered)


def _is_foreign(row: Row) -> bool:
    """Recognised for sure as another project's layout: a prompt of messages, or a reference where only it has one."""
    if "question" in row and "answer" in row:
        return False
    if isinstance(row.get("prompt"), list):
        return True
    nested = {sign.partition(".")[0] for layout in LAYOUTS for sign in layout.sign if "." in sign}
    return any(isinstance(row.get(name), dict) for name in nested) or ("prompt" in row and "label" in row)


def _column(row: Row, where: str, role: str, wanted: str, synonyms: tuple[str, ...]) -> str:
    """The name of the column to read. Only a default name may be replaced by a synonym."""
    if wanted in row:
        return wanted
    usual = {name.casefold() for name in (role, *synonyms)}
    present = [name for name in synonyms if name in row] or [name for name in row if name.strip().casefold() in usual]
    if wanted == role and len(present) == 1:
        return present[0]
    near = present or difflib.get_close_matches(wanted, list(row), n=1)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise DataError(
        f'{where}: no field "{wanted}" among {", ".join(map(str, row)) or "no fields at all"}{hint} '
        f"Name it: data.columns.{role}=COLUMN to train, --{role} COLUMN for eval and data check."
    )
