"""Read problems from JSONL, CSV or parquet, plain or gzip. No download, no shuffling, no filtering.

Published files are read as they are, by naming the columns; the one layout rule is that a GSM8K answer, which is a
worked solution ending in `#### 18`, is reduced to what follows the marks.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocstar.errors import DataError
from rocstar.types import Problem, problem_id

QUESTION_SYNONYMS = ("problem", "Question", "prompt")
ANSWER_SYNONYMS = ("Answer", "final_answer", "target")
_KINDS = (".jsonl", ".csv", ".parquet")
_GSM8K_MARK = "####"

Row = Mapping[str, Any]


def load_problems(
    path: str | Path,
    *,
    question: str = "question",
    answer: str = "answer",
    source: str | None = None,
    limit: int | None = None,
) -> list[Problem]:
    """The problems of a file, in its order.

    question, answer: column names; where a default one is absent and exactly one usual synonym is there, that is
    used. source: recorded with each problem, default the file's name. limit: read only the first so many rows.
    Numbers count as answers and become text (8.0 becomes "8"); every other column goes into `metadata`, with the line
    (parquet: the row) counted from 1 as "line". Raises DataError naming file, line and field. Source: ours."""
    file = Path(path)
    problems: list[Problem] = []
    for line, row in itertools.islice(_rows(file), limit):
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {line}: expected one JSON object with columns, got {type(row).__name__}.")
        asked = _column(file, line, row, "question", question, QUESTION_SYNONYMS)
        answered = _column(file, line, row, "answer", answer, ANSWER_SYNONYMS)
        problems.append(_problem(file, line, row, asked, answered, source or file.name))
    if not problems and limit != 0:
        raise DataError(f"{file} has no rows; give a file with at least one problem.")
    return problems


def _problem(file: Path, line: int, row: Row, asked: str, answered: str, source: str) -> Problem:
    text = _text(file, line, row, asked, numbers=False)
    gold = _text(file, line, row, answered, numbers=True)
    if _GSM8K_MARK in gold:
        gold = gold.rpartition(_GSM8K_MARK)[2].strip()
        if not gold:
            raise DataError(f'{file}, line {line}, field "{answered}": nothing follows "{_GSM8K_MARK}".')
    others = {name: value for name, value in row.items() if name not in (asked, answered)}
    return Problem(id=problem_id(text), question=text, answer=gold, source=source, metadata=others | {"line": line})


def _column(file: Path, line: int, row: Row, role: str, wanted: str, synonyms: tuple[str, ...]) -> str:
    """The name of the column to read. Only a default name may be replaced by a synonym."""
    if wanted in row:
        return wanted
    present = [name for name in synonyms if name in row]
    if wanted == role and len(present) == 1:
        return present[0]
    near = present or difflib.get_close_matches(wanted, list(row), n=1)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise DataError(
        f'{file}, line {line}: no field "{wanted}" among {", ".join(map(str, row)) or "no fields at all"}{hint} '
        f"Name the column in the recipe as data.columns.{role}."
    )


def _text(file: Path, line: int, row: Row, name: str, *, numbers: bool) -> str:
    value = row[name]
    if isinstance(value, str) and value.strip():
        return value.strip()
    if numbers and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value) if whole else value)
    found = "an empty text" if isinstance(value, str) else f"{type(value).__name__} {str(value)[:40]}"
    raise DataError(f'{file}, line {line}, field "{name}": expected {_expected(numbers)}, got {found}.')


def _expected(numbers: bool) -> str:
    return "a text or a number" if numbers else "a text"


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """(line, row) pairs; rows of JSONL may be anything JSON allows."""
    zipped = file.suffix == ".gz"
    kind = Path(file.stem).suffix if zipped else file.suffix
    if kind not in _KINDS:
        raise DataError(f"{file} is not a kind of file we read; use {', '.join(_KINDS)}, plain or with .gz.")
    content = _content(file, zipped)
    if kind == ".parquet":
        return _parquet_rows(file, content)
    text = _decoded(file, content)
    return _csv_rows(file, text) if kind == ".csv" else _json_rows(file, text)


def _content(file: Path, zipped: bool) -> bytes:
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if zipped else raw
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; check the path.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a whole gzip file ({error}); fetch it again or drop the .gz.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8.") from error


def _json_rows(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for line, written in enumerate(text.split("\n"), start=1):
        if written.strip():
            yield line, _json_value(file, line, written)


def _json_value(file: Path, line: int, written: str) -> Any:
    try:
        return json.loads(written)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {line}, column {error.colno}: not JSON ({error.msg}).") from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of thousands of digits
        raise DataError(f"{file}, line {line}: not readable as JSON ({error}).") from error


def _csv_rows(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if header is None:
                header = cells
            elif len(cells) == len(header):
                yield reader.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                raise DataError(
                    f"{file}, line {reader.line_num}: {len(cells)} cells where the header has {len(header)}."
                )
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not CSV ({error}).") from error


def _parquet_rows(file: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{file} needs pyarrow to be read; install rocstar[train].") from error
    try:
        table = parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a parquet file ({str(error).splitlines()[0]}).") from error
    return enumerate(table.to_pylist(), start=1)
