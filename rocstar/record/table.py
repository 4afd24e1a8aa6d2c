"""Files of attempts as a DuckDB table, and the filters of the command line and of the page.

One filter, `{"verdict": "right", "failed": "1.."}`, is the form of a URL of the page and of the options of `rocstar
runs rollouts`. `where_of` turns it into a condition on the columns of ROWS; every value is bound, never written into
SQL, and names of columns come from FILTERS.

Not here: the page's stored table of all attempts (view/index.py), and reading whole files (rollouts.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from rocstar.errors import DataError, first_line
from rocstar.record.call_errors import failures
from rocstar.record.folder import step_of
from rocstar.record.rollouts import BATCH_ROWS, COLUMNS, LATER_COLUMNS, SHORT_COLUMNS, Row, checked, decoded

SETTINGS: dict[str, Any] = {
    "memory_limit": "160MB",  # of all tables and queries of one run; more goes to the disk
    "threads": 2,
    "checkpoint_threshold": "2MB",  # rows that are only in the log stay in memory
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "preserve_insertion_order": True,
}
READ = "read_parquet(?, file_row_number = true, hive_partitioning = false)"
# A model can write half a surrogate pair, which Python's JSON holds and DuckDB's refuses.
SURROGATE = r"'\\u[dD][89a-fA-F][0-9a-fA-F]{2}'"
# Siblings are adjacent; a problem that occurs twice in a step begins again with a lower number.
ROWS = f"""
SELECT file_row_number AS row,
    sum((problem_id IS DISTINCT FROM before OR index <= number)::INTEGER) OVER (ORDER BY file_row_number) AS grp,
    step, problem_id, index AS sibling, verdict, reward, extracted, method, penalty_errors, penalty_format,
    penalty_total, kept, reason, weight, advantage, stop, fault, response_tokens AS tokens, n_turns AS turns, calls,
    failed_calls, seconds, tool_seconds, policy_version, entropy, tools, coalesce(failures.errors, []) AS errors,
    preview
FROM (SELECT *, lag(problem_id) OVER (ORDER BY file_row_number) AS before,
    lag(index) OVER (ORDER BY file_row_number) AS number
FROM (SELECT file_row_number, step, problem_id, index, verdict, reward, left(extracted, 200) AS extracted, method,
    penalty_errors, penalty_format, penalty_total, kept, reason, weight, advantage, stop, left(fault, 300) AS fault,
    response_tokens, json_array_length(turns) AS n_turns, calls, failed_calls, seconds, tool_seconds, policy_version,
    list_sum(entropies) / greatest(1, list_sum(json_extract(turns, '$[*].sampled_tokens')::BIGINT[])) AS entropy,
    list_distinct(json_extract_string(turns, '$[*].calls[*].tool')) AS tools, right(text[-1], 160) AS preview
    FROM (SELECT * EXCLUDE turns, regexp_replace(turns, {SURROGATE}, '\\\\ufffd', 'g') AS turns FROM {READ})))
LEFT JOIN (SELECT unnest(?::INTEGER[]) AS failed, unnest(?::VARCHAR[][]) AS errors) AS failures
ON failures.failed = file_row_number
"""
"""The attempts of a file without their bodies. Values: the file's path, and the two lists of `failures_in`."""
SAID = "contains(lower(array_to_string(text, chr(10))), ?) OR contains(lower(question), ?)"
"""Whether an attempt's question or the policy's text contains a lower-case text, which is bound twice."""
FAILED = f"SELECT file_row_number, turns FROM {READ} WHERE failed_calls > 0"
READ_BY_PEOPLE = (*SHORT_COLUMNS, "prompt_ids", "text")
"""Columns of an attempt without those of one value per token, but with the prompt that an agent sent."""
Condition = tuple[str, list[Any]]
"""SQL and the values of its question marks."""


class BadFilter(ValueError):
    """An invalid filter; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition with its values."""

    sql: str
    values: tuple[Any, ...]
    beside: str = ""
    """A join with another table that the condition uses."""


def where_of(given: Mapping[str, str], *others: Condition) -> Where:
    """The attempts that fit every filter and the other conditions. Raises BadFilter."""
    for name in given:
        if name not in FILTERS and name not in BESIDE:
            raise BadFilter(f"{name} is no filter")
    found = [FILTERS[name][0](FILTERS[name][1], name, text) for name, text in given.items() if text and name in FILTERS]
    parts = [*found, *others]
    return Where(" AND ".join(f"({sql})" for sql, _ in parts) or "true", tuple(v for _, some in parts for v in some))


def _text(column: str, name: str, text: str) -> Condition:
    """A text, or a prefix with `*` after it."""
    return (f"starts_with({column}, ?)", [text[:-1]]) if text.endswith("*") else (f"{column} = ?", [text])


def _has(column: str, name: str, text: str) -> Condition:
    """An element of a list, ignoring case."""
    return f"list_contains(list_transform({column}, lambda one: lower(one)), lower(?))", [text]


def _verdict(column: str, name: str, text: str) -> Condition:
    """`right`, `wrong`, `undecided`, `none` without a verdict, or several, separated by commas."""
    words = text.split(",")
    missing = f"{column} IS NULL" if "none" in words else "false"
    return f"list_contains(?::VARCHAR[], {column}) OR {missing}", [words]


def _holds(test: str, name: str, text: str) -> Condition:
    if text not in ("yes", "no"):
        raise BadFilter(f"{name}={text}: write yes or no")
    return (test if text == "yes" else f"NOT ({test})"), []


def _range(column: str, name: str, text: str) -> Condition:
    """`5`, `5..9`, `5..` and `..9`."""
    low, dots, high = text.partition("..")
    try:
        bounds = [float(part) if part else None for part in (low, high)]
    except ValueError:
        bounds = [None, None]
    if bounds == [None, None]:
        raise BadFilter(f"{name}={text} is no number and no range; write 5, 5..9, 5.. or ..9")
    if not dots:
        return f"{column} = ?", [bounds[0]]
    tests = [(sign, bound) for sign, bound in zip((">=", "<="), bounds, strict=True) if bound is not None]
    return " AND ".join(f"{column} {sign} ?" for sign, _ in tests), [bound for _, bound in tests]


FILTERS: Mapping[str, tuple[Callable[[str, str, str], Condition], str]] = {
    **{name: (_text, name) for name in ("part", "reason", "stop", "method")},
    **{name: (_range, name) for name in ("step", "tokens", "turns", "calls", "reward", "entropy", "seconds")},
    "failed": (_range, "failed_calls"),
    "penalty": (_range, "penalty_total"),
    "version": (_range, "policy_version"),
    "problem": (_text, "problem_id"),
    "verdict": (_verdict, "verdict"),
    "kept": (_holds, "kept"),
    "fault": (_holds, "fault IS NOT NULL"),
    "error": (_has, "errors"),
    "tool": (_has, "tools"),
}
"""Name of a filter -> the function that turns its text into a condition, and its column of ROWS."""
BESIDE = ("stage", "q", "sort", "offset", "limit")  # other parameters of a URL


def select(files: Iterable[Path], filters: Mapping[str, str]) -> Iterator[Row]:
    """The attempts that fit a filter, in order of the files, as rows of READ_BY_PEOPLE. `q`: a text in the question or
    in the policy's text, ignoring case.

    Raises BadFilter, and DataError for a file that does not hold attempts."""
    where, step = where_of(filters), filters.get("step", "")
    with duckdb.connect(config=SETTINGS) as connection:
        for file in files:
            if step.isdecimal() and file.name.startswith("step=") and step_of(file) != int(step):
                continue
            with _named(file):
                found = _fitting(connection, str(file), filters, where)
                for begin in range(0, len(found), BATCH_ROWS):
                    some = found[begin : begin + BATCH_ROWS]
                    yield from map(checked, rows_in(connection, str(file), some, READ_BY_PEOPLE))


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Raises DataError with the name of a file that does not hold attempts, MemoryError."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise MemoryError(f"{file} cannot be read for lack of memory") from None
    except (duckdb.Error, KeyError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"{file} is not a complete file of attempts: {first_line(error)}") from None


def _fitting(connection: duckdb.DuckDBPyConnection, path: str, filters: Mapping[str, str], where: Where) -> list[int]:
    """The rows of a file that fit, in order."""
    values: list[Any] = [path, *(failures_in(connection, path) if filters.get("error") else ([], [])), *where.values]
    sql = f"SELECT row FROM ({ROWS}) WHERE {where.sql}"
    if text := filters.get("q", "").lower():
        sql, values = f"{sql} AND row IN (SELECT file_row_number FROM {READ} WHERE {SAID})", [*values, path, text, text]
    return [row for (row,) in connection.execute(f"{sql} ORDER BY row", values).fetchall()]


def rows_in(
    connection: duckdb.DuckDBPyConnection, path: str, rows: Sequence[int], columns: Sequence[str] = tuple(COLUMNS)
) -> list[Row]:
    """Rows of a file by their numbers, ascending, decoded, with those of `columns` that the file has, or that older
    files lack; missing numbers are skipped. Raises duckdb.Error for a broken file."""
    sql = (
        f"SELECT COLUMNS('^({'|'.join(columns)})$') FROM {READ} WHERE file_row_number BETWEEN ? AND ? "
        "AND list_contains(?::BIGINT[], file_row_number) ORDER BY file_row_number"
    )
    found = connection.execute(sql, [path, min(rows), max(rows), list(rows)])
    names = [column[0] for column in found.description or ()]
    later = dict.fromkeys(name for name in LATER_COLUMNS if name in columns)
    return [decoded({**later, **dict(zip(names, row, strict=True))}) for row in found.fetchall()]


def failures_in(connection: duckdb.DuckDBPyConnection, path: str) -> tuple[list[int], list[list[str]]]:
    """Rows of a file with a failed call, and the distinct classes of their failures, in order. Raises duckdb.Error, and
    other errors for JSON of another shape."""
    rows, errors = list[int](), list[list[str]]()
    with connection.cursor() as cursor:
        found = cursor.execute(FAILED, [path])
        while some := found.fetchmany(BATCH_ROWS):
            for row, turns in some:
                rows.append(row)
                errors.append(list(dict.fromkeys(failures(json.loads(turns)))))
    return rows, errors
