"""Label check: a problem whose label few attempts reach is likely mislabelled (paper §4.2: 2 of 16 must agree).

The answers come from files: those that `rocstar eval` keeps of its attempts, or rows that anybody wrote.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocstar.data.problems import as_written
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Stop, problem_id

COLUMNS = ("id", "question", "answers", "problem_id", "extracted", "stop")
"""All that is read of a file; the attempts of an evaluation hold far more."""
SHOWN_ANSWERS = 3
SHOWN_CHARS = 40


class AnswerBook:
    """Answers by problem, in an SQLite file, so that memory does not grow with them."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE said (id TEXT, answer TEXT);"
        )

    def read(self, answers: Path) -> int:
        """Read a file of {"id" or "question", "answers": [text, ...]}, or the attempts of an evaluation, of which those
        that ended by a fault are no answers; several rows of one problem add up. Returns the number of rows.

        Raises DataError naming file, line and field."""
        rows = 0
        self._database.execute("BEGIN")
        for line, row in read_rows(answers, COLUMNS):
            where = f"{answers}, line {line}"
            asked = row.get("question")
            name = row.get("id") or row.get("problem_id") or (problem_id(asked.strip()) if asked else None)
            if name is None:
                raise DataError(f'{where}: no field "id" or "question"; each row says which problem it answers.')
            given = _of_attempt(row) if "extracted" in row else row.get("answers")
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise DataError(f'{where}, field "answers": expected a list of texts, got {as_written(given)}.')
            self._database.executemany("INSERT INTO said VALUES (?, ?)", [(name, text) for text in given])
            rows += 1
        self._database.execute("COMMIT")
        self._database.execute("CREATE INDEX IF NOT EXISTS said_id ON said (id)")
        return rows

    def answers(self, name: str) -> list[str]:
        """The answers to the problem of that id, in the order of the files."""
        return [
            text for (text,) in self._database.execute("SELECT answer FROM said WHERE id = ? ORDER BY rowid", (name,))
        ]

    def close(self) -> None:
        self._database.close()


def _of_attempt(row: Mapping[str, Any]) -> list[str]:
    """The answer of an attempt, in the box in which a response would hold it; an attempt may end without one."""
    if row.get("stop") == Stop.ENVIRONMENT_FAILED:
        return []
    return ["" if row["extracted"] is None else f"\\boxed{{{row['extracted']}}}"]


def disagreement(
    gold: str, said: Sequence[str], least: int, agrees: Callable[[str, str], tuple[bool, str]]
) -> str | None:
    """Evidence that fewer than `least` of the answers equal the label; None if enough do. Source: paper §4.2."""
    wrong: Counter[str] = Counter()
    right = 0
    for text in said:
        accepted, _ = agrees(gold, text)
        right += accepted
        if right >= least:
            return None
        if not accepted:
            wrong[" ".join(text[-SHOWN_CHARS:].split())] += 1
    others = "; ".join(f"{count} x {text!r}" for text, count in wrong.most_common(SHOWN_ANSWERS))
    return (
        f"{right} of {len(said)} answers equal the label {gold}, at least {least} must; others end with {others or '-'}"
    )
