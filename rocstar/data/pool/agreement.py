"""Label check: a problem whose label hardly anybody finds is likely mislabelled (paper §4.2: 2 of 16 must agree).

The answers come from a file; a model that is asked for the missing ones (`asking.py`) writes into that file.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rocstar.data.problems import as_written
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import problem_id

SHOWN_ANSWERS = 3
SHOWN_CHARS = 40


class AnswerBook:
    """Answers by problem, in an SQLite file, so that memory does not grow with them."""

    def __init__(self, file: Path) -> None:
        self.rows = 0
        """Rows that were read."""
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; CREATE TABLE said (id TEXT, answer TEXT);"
        )

    def read(self, answers: Path) -> None:
        """Take in a file of {"id" or "question", "answers": [text, ...]}; several rows of one problem add up.

        Raises DataError naming file, line and field."""
        self._database.execute("BEGIN")
        for line, row in read_rows(answers):
            where = f"{answers}, line {line}"
            self.rows += 1
            name = row.get("id") or (problem_id(row["question"].strip()) if row.get("question") else None)
            if name is None:
                raise DataError(f'{where}: no field "id" or "question"; each row says which problem it answers.')
            said = row.get("answers")
            if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
                raise DataError(f'{where}, field "answers": expected a list of texts, got {as_written(said)}.')
            self._database.executemany("INSERT INTO said VALUES (?, ?)", [(name, text) for text in said])
        self._database.execute("COMMIT")
        self._database.execute("CREATE INDEX IF NOT EXISTS said_id ON said (id)")

    def answers(self, name: str) -> list[str]:
        """What was said to the problem of that id, in the order of the file."""
        return [
            text for (text,) in self._database.execute("SELECT answer FROM said WHERE id = ? ORDER BY rowid", (name,))
        ]

    def close(self) -> None:
        self._database.close()


def disagreement(
    gold: str, said: Sequence[str], least: int, agrees: Callable[[str, str], tuple[bool, str]]
) -> str | None:
    """Evidence that fewer than `least` of the answers equal the label; None where enough do. Source: paper §4.2."""
    wrong: Counter[str] = Counter()
    right = 0
    for text in said:
        accepted, _ = agrees(gold, text)
        right += accepted
        if right >= least:
            return None
        if not accepted:
            wrong[_end(text)] += 1
    others = "; ".join(f"{count} x {text!r}" for text, count in wrong.most_common(SHOWN_ANSWERS))
    return (
        f"{right} of {len(said)} answers equal the label {gold}, at least {least} must; others end with {others or '-'}"
    )


def _end(text: str) -> str:
    return " ".join(text[-SHOWN_CHARS:].split())
