"""Seal-Tools: `query` and `calling`; tools are described in a file of their own (`tool.jsonl`).

    calling  [{"api": "getNews", "parameters": {"country": "us"}, "responses": ["API_call_0"]}]

A row is one request answered by calls made at once. Where an argument is another call's `API_call_n`, the calls depend
on results that nobody has, and the row is refused. Each conversation is offered the tools it calls and some others of
the same fields, because choosing is part of the task."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocstar.data.sft.format import Conversation, FunctionCall, Role, dumped
from rocstar.data.sft.layouts.base import (
    Layout,
    Row,
    Surroundings,
    Turns,
    companion_rows,
    each,
    list_of,
    mapping_of,
    text_of,
)
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import from_columns
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec
from rocstar.types import seed_for

RESULT = re.compile(r"\bAPI_call_\d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shelf:
    """All tools of a source."""

    tools: Mapping[str, ToolSpec]
    fields: Mapping[str, str]
    """Name of a tool -> its field (`Sports/Volleyball`)."""
    by_field: Mapping[str, Sequence[str]]


def seal_tools(around: Surroundings) -> Layout:
    if not around.tool_files:
        raise ConfigError("a source of layout seal_tools needs tool_files: the tool.jsonl of Seal-Tools")
    shelf = _shelf(around.tool_files)
    return each(lambda row: _conversation(row, shelf, around))


def _shelf(files: Sequence[Path]) -> _Shelf:
    tools: dict[str, ToolSpec] = {}
    fields: dict[str, str] = {}
    by_field: dict[str, list[str]] = defaultdict(list)
    for row in companion_rows(files):
        name, field = text_of(row, "api_name"), str(row.get("field", ""))
        tools[name] = from_columns(name, row.get("api_description"), row.get("parameters"), list_of(row, "required"))
        fields[name] = field
        by_field[field].append(name)
    return _Shelf(tools=tools, fields=fields, by_field=by_field)


def _conversation(row: Row, shelf: _Shelf, around: Surroundings) -> Conversation:
    calling = [mapping_of(call, "calling") for call in list_of(row, "calling")]
    calls = [
        FunctionCall(name=text_of(c, "api"), arguments=mapping_of(c.get("parameters"), "calling")) for c in calling
    ]
    for call in calls:
        unknown = RESULT.search(str(call.arguments))
        if unknown:
            raise Refused(Reason.PLACEHOLDER, "calling", f"{call.name} is given {unknown[0]}, a result nobody has")
        if call.name not in shelf.tools:
            raise Refused(Reason.UNKNOWN_TOOL, "calling", f"tool_files describe no {call.name!r}")
    turns = Turns()
    turns.add(Role.USER, text_of(row, "query"))
    turns.calls(calls)
    rng = random.Random(seed_for(around.seed, "other tools", dumped(row)))
    return turns.conversation([shelf.tools[name] for name in _offered(calls, shelf, around.other_tools, rng)])


def _offered(calls: Sequence[FunctionCall], shelf: _Shelf, others: int, rng: random.Random) -> list[str]:
    called = list(dict.fromkeys(call.name for call in calls))
    near = [name for field in dict.fromkeys(shelf.fields[c] for c in called) for name in shelf.by_field[field]]
    free = [name for name in near if name not in called]
    offered = called + rng.sample(free, min(others, len(free)))
    rng.shuffle(offered)
    return offered
