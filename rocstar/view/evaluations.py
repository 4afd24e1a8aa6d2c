"""An evaluation on the page: its figures, and two of them paired by the functions of `rocstar compare`.

The table of one evaluation is the list of its groups (query.groups), wrong answers first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError
from rocstar.evaluation.compare import Kept, compared, read_kept, refuse_different
from rocstar.record.evaluations import RESULT
from rocstar.record.folder import read_json
from rocstar.view.index import Index


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
