"""Problems with a short answer, judged by the answer checker (`rocstar/answers`) under `evaluate.verifier`."""

from __future__ import annotations

from typing import Any

from rocstar.data.problems import ProblemColumns, problem_of
from rocstar.errors import DataError
from rocstar.evaluation.benchmark import BenchmarkFile, Rows, lines
from rocstar.types import Problem


def columns(file: BenchmarkFile) -> list[str]:
    return [file.question, file.answer]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError. A number as the answer becomes text, as in any data file (`data/problems.py`)."""
    wanted = ProblemColumns(layout="given", question=(file.question,), answer=file.answer)
    made = []
    for number, (part, where, row) in enumerate(lines(rows, file.files), start=1):
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected one JSON object with columns, got {type(row).__name__}.")
        made.append(problem_of(_joined(row, file.answer), wanted, where=where, source=part, line=number))
    return made


def _joined(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Several answers as one list in text: all of them are asked for (OlympiadBench)."""
    answer = row.get(name)
    return {**row, name: ", ".join(map(str, answer))} if isinstance(answer, list) else row
