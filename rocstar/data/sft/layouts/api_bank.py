"""API-Bank, level 1 and 2: `turns` of User, AI and API, one dialogue a row.

    {"role": "API", "api_name": "AddAgenda", "param_dict": {...}, "result": {"output": ..., "exception": null}}

`param_dict` holds what the dialogue's writer typed, often as text (`"2"`, `"['John']"`); `result.input` holds the same
arguments as the API took them (`2`, `["John"]`), and those are learned.

The dialogues come without tool schemas. They are put together from the data: what the tool searches found (name,
description, parameters), else the parameters seen in all calls of the same name, required where every call gives them.
A check of a call against the latter can only find what other calls contradict. A dialogue is offered the tools that its
file is named after (`AddAgenda-AddAlarm-level-1-1.jsonl`) and those it calls."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, list_of, mapping_of, text_of
from rocstar.data.sft.reading import read_rows
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import from_columns
from rocstar.protocols import ToolSpec

SPEAKERS = {"User": Role.USER, "AI": Role.ASSISTANT}
NAMED = re.compile(r"-level-\d.*$")
WORDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def api_bank(around: Surroundings) -> Layout:
    """Reads the files once for their tools, before the first row."""
    tools = _tools(around.files)
    return each(lambda row: _conversation(row, tools))


def _conversation(row: Row, tools: Mapping[str, ToolSpec]) -> Conversation:
    turns, called = Turns(), []
    for turn in list_of(row, "turns"):
        fields = mapping_of(turn, "turns")
        role = fields.get("role")
        if role == "API":
            name = text_of(fields, "api_name")
            turns.calls([FunctionCall(name=name, arguments=_arguments(fields))])
            turns.add(Role.TOOL, _result(mapping_of(fields.get("result"), "result")))
            called.append(name)
        elif role in SPEAKERS:
            turns.add(SPEAKERS[role], text_of(fields, "text"))
        else:
            raise Refused(Reason.ROLES, "turns", f"nobody we know speaks as {role!r}")
    offered = dict.fromkeys([*_named(str(row.get("file", "")), tools), *called])
    return turns.conversation([tools[name] for name in offered])


def _arguments(turn: Row) -> Mapping[str, Any]:
    """The arguments as the API took them. Raises Refused where they are others than those written."""
    written = mapping_of(turn.get("param_dict"), "param_dict")
    taken = mapping_of(turn.get("result"), "result").get("input")
    if not isinstance(taken, Mapping):
        return written
    if {key: str(value) for key, value in taken.items()} != {key: str(value) for key, value in written.items()}:
        raise Refused(Reason.NO_RESULT, "result", f"is the result of other arguments: {str(taken)[:60]}")
    return taken


def _result(result: Mapping[str, Any]) -> str:
    if result.get("exception"):
        return f"Error: {result['exception']}"
    output = result.get("output")
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _named(file: str, tools: Mapping[str, ToolSpec]) -> list[str]:
    return [name for name in NAMED.sub("", Path(file).name).split("-") if name in tools]


def _tools(files: Sequence[Path]) -> dict[str, ToolSpec]:
    described: dict[str, Mapping[str, Any]] = {}
    seen: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for turn in _api_turns(files):
        with suppress(Refused):  # told when its row comes
            seen[text_of(turn, "api_name")].append(_arguments(turn))
        for tool in _found(turn.get("result")):
            described[tool["name"]] = tool
    return {name: _tool(name, calls, described.get(name)) for name, calls in seen.items()}


def _found(result: Any) -> Iterator[Mapping[str, Any]]:
    """The tools that a tool search found."""
    output = result.get("output") if isinstance(result, Mapping) else None
    for tool in output if isinstance(output, list) else [output]:
        if isinstance(tool, Mapping) and isinstance(tool.get("input_parameters"), Mapping) and "name" in tool:
            yield tool


def _tool(name: str, calls: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> ToolSpec:
    columns = _columns(calls) | dict(described["input_parameters"] if described else {})
    required = [column for column in columns if all(column in arguments for arguments in calls)]
    return from_columns(name, (described or {}).get("description"), columns, required)


def _api_turns(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        for _, row in read_rows(file):
            turns = row.get("turns") if isinstance(row, Mapping) else None
            yield from (t for t in turns or () if isinstance(t, Mapping) and t.get("role") == "API" and "api_name" in t)


def _columns(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each parameter with its commonest type."""
    kinds: dict[str, Counter[type]] = defaultdict(Counter)
    for arguments in calls:
        for key, value in arguments.items():
            kinds[key][type(value)] += 1
    commonest = {key: found.most_common(1)[0][0] for key, found in kinds.items()}
    return {key: {"type": WORDS[kind]} if kind in WORDS else {} for key, kind in commonest.items()}
