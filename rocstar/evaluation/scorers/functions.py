"""BFCL, single turn, Python: the model sees functions and calls some, or none if none fits. Nothing is run: the calls
are compared with the possible answers by name, types and values.

A category (simple, multiple, parallel ..., live or not) is a file of rows, and the file of possible answers of the same
name. Without one, the category asks whether the model calls at all: `irrelevance` expects no call, `relevance` some.
Source: BFCL (Patil et al. 2025), Apache-2.0, its `ast_checker` written anew; departure: a "." in a function's name may
come back as "_", as in the original for models that cannot write dots. Refused: Java and JavaScript, and categories
that need the systems that BFCL simulates (multi-turn, memory, web search)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from rocstar.answers.extract import counts_as_cut, written
from rocstar.errors import DataError
from rocstar.evaluation.benchmark import BenchmarkFile, Row, Rows, column, lines
from rocstar.evaluation.scoring import Scorer, judged
from rocstar.types import Group, Outcome, Problem, ToolCall, Trajectory, Verdict, problem_id

PYTHON = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
SCHEMA = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's types as those of JSON schema, where they differ."""
NON_LIVE = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = tuple(f"live_{name}" for name in ("simple", *NON_LIVE[1:], "relevance"))
ELSEWHERE = (
    *("simple_java", "simple_javascript"),
    *(f"multi_turn_{name}" for name in ("base", "miss_func", "miss_param", "long_context")),
)
"""Categories of BFCL v3; the last are not scored here."""
_VERSION = re.compile(r"^BFCL_v\d+_")
_IGNORED = re.compile(r"[ ,./\-_*^]")


def columns(file: BenchmarkFile) -> list[str]:
    return ["id", "question", "function", "ground_truth"]


def problems(file: BenchmarkFile, rows: Rows) -> list[Problem]:
    """Raises DataError. `family` is the category."""
    answers = list(lines(rows, file.answers))
    truths = {str(column(row, "id", where)): column(row, "ground_truth", where) for _, where, row in answers}
    answered = {part for part, _, _ in answers}
    return [
        _problem(part, where, row, truths if part in answered else None) for part, where, row in lines(rows, file.files)
    ]


def _problem(part: str, where: str, row: Row, truths: Mapping[str, Any] | None) -> Problem:
    name, conversations = str(column(row, "id", where)), column(row, "question", where)
    if "involved_classes" in row or not isinstance(conversations, list) or len(conversations) != 1:
        raise DataError(
            f"{where}: BFCL's category {part} needs the systems that BFCL simulates, which are programs and not among "
            "its rows, so it is not scored here; take it out of `files`"
        )
    if truths is not None and name not in truths:
        raise DataError(f"{where}: there is no possible answer for {name!r} in the files of answers.")
    functions = column(row, "function", where)
    foreign = {kind for function in functions for kind in _types(function["parameters"])} - PYTHON.keys()
    if foreign:
        raise DataError(
            f"{where}: BFCL's category {part} has values of type {min(foreign)}, and only those of Python are scored "
            "here; take it out of `files`"
        )
    metadata = {
        "family": part,
        "functions": [shown(one) for one in functions],
        "described": functions,
        "possible": truths[name] if truths is not None else None,
        "wants_call": "irrelevance" not in part,
    }
    messages = by_turns(conversations[0])
    asked = "\n\n".join(message["content"] for message in messages if message["role"] == "user")
    return Problem(
        id=problem_id(f"{name}\n{asked}"),
        question=messages[-1]["content"],
        answer="",
        source=part,
        metadata=metadata,
        messages=messages,
    )


def by_turns(messages: Sequence[Row]) -> tuple[dict[str, str], ...]:
    """A conversation as a Problem has it: its system texts as one, adjacent messages of one speaker joined."""
    speakers = groupby(sorted(messages, key=lambda one: one["role"] != "system"), key=itemgetter("role"))
    return tuple({"role": role, "content": "\n\n".join(str(one["content"]) for one in some)} for role, some in speakers)


def _types(described: Row) -> Iterator[str]:
    """The types of the described parameters, of their items and nested properties."""
    for one in described.get("properties", {}).values():
        yield one["type"]
        yield from [one["items"]["type"]] if one["type"] in ("array", "tuple") else _types(one)


def shown(function: Row) -> dict[str, Any]:
    """A function as shown to the model: name, description, and its parameters as JSON schema."""
    return {**function, "parameters": _schema(function["parameters"])}


def _schema(value: Any) -> Any:
    if isinstance(value, dict):
        kind = value.get("type")
        own = {"type": SCHEMA.get(kind, kind)} if isinstance(kind, str) else {}
        return {key: _schema(inner) for key, inner in value.items()} | own
    return [_schema(inner) for inner in value] if isinstance(value, list) else value


class FunctionScorer(Scorer):
    def figures(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Parts of BFCL v3's sum, and the categories that were not run (`not_run`): `non_live_python`, whose categories
        count equally, and `live`, whose rows do. BFCL's overall figure is the mean of non-live (with Java and
        JavaScript among the simple ones), live and multi-turn, and can't be computed from these. Source: BFCL's
        `generate_leaderboard_csv`."""
        shares: dict[str, list[float]] = {}
        for group in groups:
            right = [a.outcome.verdict is Verdict.RIGHT for a in group.trajectories if a.outcome]
            if right:
                shares.setdefault(_VERSION.sub("", str(group.problem.metadata["family"])), []).append(fmean(right))
        non_live = [fmean(shares[name]) for name in NON_LIVE if name in shares]
        live = [share for name in LIVE for share in shares.get(name, ())]
        means = {name: fmean(part) for name, part in (("non_live_python", non_live), ("live", live)) if part}
        return (
            {**means, "not_run": [name for name in (*NON_LIVE, *LIVE, *ELSEWHERE) if name not in shares]}
            if means
            else {}
        )

    def outcome(self, problem: Problem, attempt: Trajectory) -> Outcome:
        counts_as_cut(attempt, "graded")
        calls = [call for turn in attempt.turns for call in turn.calls]
        complaint = complaint_of(problem.metadata, calls)
        calls_text = json.dumps([{call.tool: call.arguments} for call in calls], default=str) if calls else None
        text = "\n".join(written(self.codec, self.calls, attempt))
        return judged(complaint is None, method=complaint or "calls", extracted=calls_text, text=text)


def complaint_of(expected: Mapping[str, Any], calls: Sequence[ToolCall]) -> str | None:
    """The error in the calls, in a word or two; None if they are right. expected: metadata of the problem."""
    if expected["possible"] is None:
        called = any(call.parse_error is None for call in calls)
        return None if called == expected["wants_call"] else "called" if called else "no call"
    if any(call.parse_error is not None for call in calls):
        return "malformed call"
    if len(calls) != len(expected["possible"]):
        return "wrong number of calls"
    left, complaint = list(calls), None
    for possible in expected["possible"]:
        ((name, values),) = possible.items()
        parameters = next(function["parameters"] for function in expected["described"] if function["name"] == name)
        complaints = [_mismatch(name, parameters, values, call) for call in left]
        if None not in complaints:
            complaint = complaints[0]
            break
        left.pop(complaints.index(None))
    return complaint


def _mismatch(name: str, parameters: Row, possible: Mapping[str, Sequence[Any]], call: ToolCall) -> str | None:
    if call.tool.replace(".", "_") != name.replace(".", "_"):
        return "wrong function"
    if any(one not in call.arguments for one in parameters["required"]):
        return "required parameter missing"
    for parameter, value in call.arguments.items():
        if parameter not in parameters["properties"] or parameter not in possible:
            return "unexpected parameter"
        if complaint := _wrong_value(parameters["properties"][parameter], value, possible[parameter]):
            return complaint
    missing = (one for one, values in possible.items() if one not in call.arguments and "" not in values)
    return "parameter missing" if next(missing, None) is not None else None


def _wrong_value(described: Row, value: Any, possible: Sequence[Any]) -> str | None:
    kind = PYTHON[described["type"]]
    inner = PYTHON[described["items"]["type"]] if described["type"] in ("array", "tuple") else None
    if kind is float and type(value) is int:
        if abs(value) > sys.float_info.max:
            return "wrong value"
        value = float(value)
    first = next((type(one) for one in possible if one != ""), None)
    if type(value) is not kind:
        if first is None or type(value) is not first:
            return "wrong type"
        return None if value in possible else "wrong value"  # a variable's name counts as the value
    if inner is not None and isinstance(value, list) and not any(_items_fit(inner, value, one) for one in possible):
        return "wrong type"
    if first is not None and first is not kind:
        return None if value in possible else "wrong value"
    return None if _is_among(kind, inner, value, possible) else "wrong value"


def _items_fit(inner: type, value: Sequence[Any], possible: Any) -> bool:
    """Whether each item is of the declared type, or of that of the items that are right."""
    if not isinstance(possible, list):
        return True
    first = next((type(one) for one in possible if one != ""), None)
    return all(type(item) is inner or (first is not None and type(item) is first) for item in value)


def _is_among(kind: type, inner: type | None, value: Any, possible: Sequence[Any]) -> bool:
    if kind is dict:
        return any(_is_dict(value, one) for one in possible if one != "")
    if kind is list and inner is dict:
        lists = (one for one in possible if isinstance(one, list) and len(one) == len(value))
        return any(all(map(_is_dict, value, one)) for one in lists)
    if kind is str:
        return _plain(value) in [_plain(one) for one in possible if isinstance(one, str)]
    if kind is list:
        expected = [[_plain(item) for item in one] for one in possible if one == "" or isinstance(one, list)]
        return [_plain(item) for item in value] in expected
    return value in possible


def _is_dict(value: Any, possible: Any) -> bool:
    """possible: key -> the right values; "" among them: the key may be omitted."""
    if not isinstance(value, dict) or not isinstance(possible, dict):
        return False
    known = all(key in possible and _plain(one) in map(_plain, possible[key]) for key, one in value.items())
    return known and all(key in value or "" in values for key, values in possible.items())


def _plain(value: Any) -> Any:
    """A text without case, blanks and the characters that BFCL ignores; anything else unchanged."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
