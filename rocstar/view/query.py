"""Questions to the table of attempts: pages of a sorted list, groups, counts; and evaluations: the figures of one, and
two of them paired by the functions of `rocstar compare`. The table of one evaluation is the list of its groups, wrong
answers first. What filters mean is said in record/table.py; every value of a URL is bound, never written into SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError
from rocstar.evaluation.compare import Kept, compared, read_kept, refuse_different
from rocstar.record.evaluations import RESULT
from rocstar.record.folder import read_json
from rocstar.record.table import BadFilter, Condition, Where, where_of
from rocstar.view.index import Index

MOST_ROWS = 500  # of one answer
SORTS = (
    *("step", "reward", "penalty_total", "advantage", "tokens", "turns", "calls", "failed_calls", "entropy"),
    *("seconds", "tool_seconds", "problem_id", "verdict", "reason", "stop"),
)
FACETS = ("verdict", "reason", "stop", "part", "method")
FACETS_OF_LISTS = {"error": "errors", "tool": "tools"}
GROUP_SORTS = ("step", "share", "attempts", "kept", "tokens", "failed_calls", "entropy")

Span = Mapping[str, Any]
"""A stage: `name`, `first` and `last` step."""


def filtered(asked: Mapping[str, str], stages: Sequence[Span] = (), hits: int | None = None) -> Where:
    """The condition that a URL asks for. hits: number of a text search. Raises BadFilter."""
    others = [_within_stage(asked["stage"], stages)] if asked.get("stage") else []
    if hits is None:
        return where_of(asked, *others)
    others.append(("search = ? AND get_bit(bits, row) = 1", [hits]))
    return replace(where_of(asked, *others), beside="JOIN found.hits USING (file)")


def _chosen(where: Where) -> str:
    return f"attempts {where.beside} WHERE {where.sql}"


def _within_stage(name: str, stages: Sequence[Span]) -> Condition:
    spans = [stage for stage in stages if stage["name"] == name]
    if not spans:
        raise BadFilter(f"there is no stage {name}")
    each = " OR ".join("step BETWEEN ? AND ?" for _ in spans)
    return each, [step for span in spans for step in (span["first"], span["last"])]


def attempts(index: Index, where: Where, *, sort: str, offset: int, limit: int) -> list[dict[str, Any]]:
    """A page of attempts. sort: a column, with `-` before it for the largest first. Raises BadFilter."""
    page = f"SELECT attempts.rowid AS place FROM {_chosen(where)} ORDER BY {_order(sort, SORTS)} LIMIT ? OFFSET ?"
    # The page first, then its columns: sorting whole rows would carry the wide ones along. By rowid the columns of 100
    # rows take 1/7 of the CPU time that a join by (file, row) over a million rows takes.
    sql = (
        f"SELECT a.*, left(p.question, 160) AS question FROM ({page}) JOIN attempts a ON a.rowid = place "
        f"LEFT JOIN problems p ON p.problem_id = a.problem_id ORDER BY {_order(sort, SORTS, 'a.')}"
    )
    return index.rows(sql, [*where.values, min(limit, MOST_ROWS), offset])


def count(index: Index, where: Where) -> int:
    return int(index.ask(f"SELECT count(*) FROM {_chosen(where)}", where.values)[0][0])


def facets(index: Index, where: Where) -> dict[str, list[tuple[str, int]]]:
    """How many attempts of the filter have which value, the most frequent first."""
    found = {name: _counted(index, name, where) for name in FACETS}
    return found | {name: _counted(index, f"unnest({column})", where) for name, column in FACETS_OF_LISTS.items()}


def _counted(index: Index, value: str, where: Where) -> list[tuple[str, int]]:
    sql = f"SELECT value, count(*) AS n FROM (SELECT {value} AS value FROM {_chosen(where)}) GROUP BY value"
    rows = index.ask(
        f"SELECT value, n FROM ({sql}) WHERE value IS NOT NULL ORDER BY n DESC, value LIMIT 40", where.values
    )
    return [(str(value), int(n)) for value, n in rows]


def groups(index: Index, where: Where, *, sort: str, offset: int, limit: int) -> dict[str, Any]:
    """A page of the groups that the filtered attempts belong to: siblings of one problem in one step. `total` is that
    of all pages; 0 beyond the last."""
    of = (
        "SELECT file, grp, any_value(part) AS part, any_value(step) AS step, any_value(problem_id) AS problem_id, "
        "count(*) AS attempts, sum((verdict = 'right')::INT) AS right, sum((verdict = 'wrong')::INT) AS wrong, "
        "sum(kept::INT) AS kept, avg(tokens) AS tokens, sum(calls) AS calls, sum(failed_calls) AS failed_calls, "
        "avg(entropy) AS entropy, avg((verdict = 'right')::INT) AS share, mode(reason) AS reason FROM "
        f"{_chosen(where)} GROUP BY file, grp"
    )
    order = _order(sort, GROUP_SORTS, row="grp")
    page = f"SELECT *, count(*) OVER () AS total FROM ({of}) ORDER BY {order} LIMIT ? OFFSET ?"
    sql = (
        f"SELECT g.*, left(p.question, 160) AS question, p.gold FROM ({page}) g "
        f"LEFT JOIN problems p ON p.problem_id = g.problem_id ORDER BY {_order(sort, GROUP_SORTS, 'g.', 'grp')}"
    )
    rows = index.rows(sql, [*where.values, min(limit, MOST_ROWS), offset])
    return {"total": rows[0]["total"] if rows else 0, "rows": rows}


def group_of(index: Index, file: int, grp: int) -> list[dict[str, Any]]:
    """The siblings of a group, in order."""
    return index.rows("SELECT * FROM attempts WHERE file = ? AND grp = ? ORDER BY row", [file, grp])


def problem_of(index: Index, problem: str) -> dict[str, Any]:
    found = index.rows("SELECT * FROM problems WHERE problem_id = ?", [problem])
    return found[0] if found else {"problem_id": problem, "question": "", "gold": "", "source": ""}


def _order(sort: str, known: Sequence[str], prefix: str = "", row: str = "row") -> str:
    name = sort.removeprefix("-")
    if name not in known:
        raise BadFilter(f"sort={sort}: sort by one of {', '.join(known)}")
    way = "DESC" if sort.startswith("-") else "ASC"
    return f"{prefix}{name} {way} NULLS LAST, {prefix}file, {prefix}{row}"


def evaluation_folder(index: Index, name: str, step: int) -> Path:
    """Raises KeyError."""
    there = {(part, at): folder for part, at, folder in index.source.evaluation_folders()}
    return there[name, step]


def evaluation_of(index: Index, name: str, step: int) -> dict[str, Any]:
    """Its result without transcripts, which lie among the attempts. Raises KeyError, DataError."""
    result = read_json(evaluation_folder(index, name, step) / RESULT)
    return {key: value for key, value in result.items() if key != "transcripts"}


def paired(a: tuple[Index, str, int], b: tuple[Index, str, int]) -> dict[str, Any]:
    """B against A, with the question and the group of each problem; `differs` says in a sentence what was not asked
    alike. Raises KeyError, DataError."""
    kept = [read_kept(evaluation_folder(*one)) for one in (a, b)]
    found = compared(*kept)
    places = [_places(*one) for one in (a, b)]
    for row in found["table"]:
        known = [place.get(row["problem_id"], {}) for place in places]
        row |= {
            "question": known[0].get("question"),
            "gold": known[0].get("gold"),
            "groups": [one.get("grp") for one in known],
        }
    return {**found, "differs": _difference(*kept)}


def _places(index: Index, name: str, step: int) -> Mapping[str, Mapping[str, Any]]:
    rows = index.rows(
        "SELECT a.problem_id, min(a.grp) AS grp, left(any_value(p.question), 160) AS question, "
        "any_value(p.gold) AS gold FROM attempts a LEFT JOIN problems p ON p.problem_id = a.problem_id "
        "WHERE a.part = ? AND a.step = ? GROUP BY 1",
        [name, step],
    )
    return {row["problem_id"]: row for row in rows}


def _difference(a: Kept, b: Kept) -> str | None:
    try:
        refuse_different(a, b, ())
    except ConfigError as error:
        return str(error).partition("; evaluate both alike")[0]
    return None
