"""Attempts that fit a description, from rollout files and evaluations, a batch at a time.

The short columns are read first; the long ones (tokens, text, turns) only of batches where something fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.errors import ConfigError, DataError
from rocstar.record.call_errors import error_of_result
from rocstar.record.folder import step_of
from rocstar.record.rollouts import COLUMNS

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BATCH_ROWS = 256
TOKENS = tuple(
    name for name, kind in COLUMNS.items() if kind.startswith("list<") and name not in ("text", "prompt_ids")
)
"""Columns of one value for each token of an attempt, which no person reads; rows come without them."""
SORTS = tuple(name for name, kind in COLUMNS.items() if kind in ("float", "int32", "int64"))
"""Columns of one number an attempt."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which attempts; a field that is None excludes none."""

    step: int | None = None
    """Of the run."""
    problem: str | None = None
    """How the problem's id begins."""
    verdict: str | None = None
    """right, wrong or undecided."""
    kept: bool | None = None
    """Whether the resampler kept it."""
    stop: str | None = None
    """Why it ended: answered, max_turns, max_tokens, environment_failed."""
    error: str | None = None
    """A class of failure that one of its calls shows (record/call_errors.py), whatever the case."""
    text: str | None = None
    """Stands in the question or in what the policy wrote, whatever the case."""


def select(files: Iterable[Path], wanted: Wanted) -> Iterator[Row]:
    """Rows of `rocstar.record.rollouts.COLUMNS` without TOKENS, `turns` decoded, in order of the files.

    Raises DataError for a file that is none of attempts."""
    for file in files:
        if wanted.step is None or not file.name.startswith("step=") or step_of(file) == wanted.step:
            yield from _of_file(file, wanted)


def _of_file(file: Path, wanted: Wanted) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        opened = parquet.ParquetFile(file)
        for group in range(opened.num_row_groups):
            yield from _of_group(opened, group, wanted)
    except (ArrowException, KeyError, OSError, ValueError) as error:
        raise DataError(f"{file} is no whole file of attempts: {str(error).splitlines()[0]}") from None


def _of_group(opened: ParquetFile, group: int, wanted: Wanted) -> Iterator[Row]:
    columns = [name for name in opened.schema_arrow.names if name not in TOKENS]
    short = opened.read_row_group(group, ["step", "problem_id", "verdict", "kept", "stop"]).to_pylist()
    if not any(_fits(row, wanted) for row in short):
        return
    for batch in opened.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
        for row in batch.to_pylist():
            if _fits(row, wanted) and _says(row, wanted.text):
                decoded = {**row, "turns": json.loads(row["turns"])}
                if wanted.error is None or wanted.error.lower() in map(str.lower, failures(decoded)):
                    yield decoded


def first(rows: Iterable[Row], count: int, column: str | None) -> list[Row]:
    """The first `count` of them, or those with most in a column of numbers, most first. Raises ConfigError."""
    if column is None:
        return list(islice(rows, count))
    if column not in SORTS:
        raise ConfigError(f"attempts cannot be sorted by {column}; choose one of {', '.join(SORTS)}")
    return nlargest(count, rows, key=lambda row: -math.inf if row[column] in (None, math.nan) else row[column])


def failures(row: Mapping[str, Any]) -> list[str]:
    """The class of each failed call of a row whose turns are decoded, in order."""
    ended = (
        error_of_result(result, call["parse_error"])
        for turn in row["turns"]
        for call, result in zip(turn["calls"], turn["results"], strict=False)
    )
    return [error for error in ended if error is not None]


def _fits(row: Mapping[str, Any], wanted: Wanted) -> bool:
    return (
        wanted.step in (None, row["step"])
        and (wanted.problem is None or row["problem_id"].startswith(wanted.problem))
        and wanted.verdict in (None, row["verdict"] or "undecided")
        and wanted.kept in (None, row["kept"])
        and wanted.stop in (None, row["stop"])
    )


def _says(row: Mapping[str, Any], text: str | None) -> bool:
    return text is None or any(text.lower() in one.lower() for one in (row["question"], *row["text"]))
