"""Layouts whose rows are requests with the calls that answer them (xlam, seal_tools, magicoder), and the table of
all published layouts of SFT data. A layout turns one row into a conversation; `LAYOUTS` names them."""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.data.sft.check import readable
from rocstar.data.sft.dialogues import (
    LayoutContext,
    Row,
    RowReader,
    Turns,
    api_bank,
    companion_rows,
    glaive,
    list_of,
    mapping_of,
    messages,
    nemotron,
    pairs,
    sharegpt,
    text_of,
    toolace,
)
from rocstar.data.sft.format import (
    Chat,
    FunctionCall,
    Refusal,
    Refused,
    Role,
    call_of,
    dumped,
    from_columns,
    tool_spec,
)
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec
from rocstar.types import seed_for

# APIGen / xLAM: `query`, `answers` and `tools`, the last two as JSON text.
#
#     tools    [{"name": "f", "description": "...", "parameters": {"x": {"type": "int, optional", "description": "...",
#                                                                        "default": 3}}}]
#     answers  [{"name": "f", "arguments": {"x": 1}}]
#
# A parameter is required unless its type says `optional` or it has a default.


def xlam(row: Row) -> Chat:
    turns = Turns(text_of(row, "query"))
    answers = list_of(row, "answers")
    if not answers:
        raise Refused(Refusal.NO_ANSWER, "answers", "holds no call")
    turns.calls(call_of(answer, "answers") for answer in answers)
    return turns.chat([_xlam_tool(tool) for tool in list_of(row, "tools")])


def _xlam_tool(raw: Any) -> ToolSpec:
    tool = mapping_of(raw, "tools")
    columns = tool.get("parameters")
    if not isinstance(columns, Mapping) or "properties" in columns or not isinstance(tool.get("name"), str):
        return tool_spec(raw)
    required = [
        name
        for name, column in columns.items()
        if isinstance(column, Mapping) and "optional" not in str(column.get("type", "")) and "default" not in column
    ]
    plain = {name: _xlam_column(column) for name, column in columns.items()}
    return from_columns(tool["name"], tool.get("description"), plain, required)


def _xlam_column(column: Any) -> Any:
    """`int, optional` is `int`; an empty default, which xLAM writes for "none", is left out."""
    if not isinstance(column, Mapping):
        return {}
    kept = {key: value for key, value in column.items() if key != "default" or value not in ("", None)}
    return kept | ({"type": column["type"].split(",")[0]} if isinstance(column.get("type"), str) else {})


# Seal-Tools: `query` and `calling`; tools are described in a file of their own (`tool.jsonl`).
#
#     calling  [{"api": "getNews", "parameters": {"country": "us"}, "responses": ["API_call_0"]}]
#
# A row is one request answered by calls made at once. Where an argument is another call's `API_call_n`, the calls
# depend on results that nobody has, and the row is refused. Each conversation is offered the tools it calls and some
# others of the same fields, because choosing is part of the task.

SEAL_RESULT = re.compile(r"\bAPI_call_\d+\b")


def seal_tools(context: LayoutContext) -> RowReader:
    if not context.tool_files:
        raise ConfigError("a source of layout seal_tools needs tool_files: the tool.jsonl of Seal-Tools")
    tools: dict[str, ToolSpec] = {}
    fields: dict[str, str] = {}  # of each tool, such as `Sports/Volleyball`
    by_field: dict[str, list[str]] = defaultdict(list)
    for row in companion_rows(context.tool_files):
        name, field = text_of(row, "api_name"), str(row.get("field", ""))
        tools[name] = from_columns(name, row.get("api_description"), row.get("parameters"), list_of(row, "required"))
        fields[name] = field
        by_field[field].append(name)

    def read(row: Row) -> Chat:
        calls = _seal_calls(row, tools)
        turns = Turns(text_of(row, "query"))
        turns.calls(calls)
        called = list(dict.fromkeys(call.name for call in calls))
        near = [name for field in dict.fromkeys(fields[c] for c in called) for name in by_field[field]]
        free = [name for name in near if name not in called]
        rng = random.Random(seed_for(context.seed, "other tools", dumped(row)))
        offered = called + rng.sample(free, min(context.other_tools, len(free)))
        rng.shuffle(offered)
        return turns.chat([tools[name] for name in offered])

    return read


def _seal_calls(row: Row, tools: Mapping[str, ToolSpec]) -> list[FunctionCall]:
    calling = [mapping_of(call, "calling") for call in list_of(row, "calling")]
    calls = [
        FunctionCall(name=text_of(c, "api"), arguments=mapping_of(c.get("parameters"), "calling")) for c in calling
    ]
    for call in calls:
        if unknown := SEAL_RESULT.search(str(call.arguments)):
            raise Refused(Refusal.PLACEHOLDER, "calling", f"{call.name} is given {unknown[0]}, a result nobody has")
        if call.name not in tools:
            raise Refused(Refusal.UNKNOWN_TOOL, "calling", f"tool_files describe no {call.name!r}")
    return calls


# Magicoder's OSS-Instruct (`problem`, `solution`, `lang`) and Evol-Instruct (`instruction`, `response`): the one Python
# program of a solution becomes a call of the code tool. It is not run: the row ends with the call. Words before the
# program stay, words after it go, because they speak of a result the assistant has not seen.

FENCED = re.compile(r"^```[ \t]*([\w+#.-]*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def magicoder(context: LayoutContext) -> RowReader:
    tool = context.code_tool

    def read(row: Row) -> Chat:
        asked, answered = ("problem", "solution") if "problem" in row else ("instruction", "response")
        response = text_of(row, answered)
        blocks = list(FENCED.finditer(response))
        if len(blocks) != 1:
            raise Refused(Refusal.CODE, answered, f"holds {len(blocks)} blocks of code; one is wanted")
        language = blocks[0][1].lower() or str(row.get("lang", "")).lower()
        if language not in PYTHON:
            raise Refused(Refusal.CODE, answered, f"is written in {language or 'no named language'}")
        code = blocks[0][2].rstrip()
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(Refusal.CODE, answered, f"is not Python: {error}") from None
        turns = Turns(text_of(row, asked))
        if before := response[: blocks[0].start()].strip():
            turns.add(Role.ASSISTANT, before)
        turns.calls([FunctionCall(name=tool.name, arguments={next(iter(tool.parameters["properties"])): code})])
        return turns.chat([tool])

    return read


def _by_row(read: RowReader) -> Callable[[LayoutContext], RowReader]:
    """A layout that needs nothing but the row."""
    return lambda _: read


LAYOUTS: Mapping[str, Callable[[LayoutContext], RowReader]] = {
    **{read.__name__: _by_row(read) for read in (messages, pairs, nemotron, sharegpt, glaive, toolace, xlam)},
    **{make.__name__: make for make in (seal_tools, api_bank, magicoder)},
}


def conversation(reader: RowReader, row: Any) -> Chat | Refused:
    """What a layout's reader makes of a row."""
    try:
        if not isinstance(readable(row), dict):
            raise Refused(Refusal.LAYOUT, "line", f"expected an object with fields, got {type(row).__name__}")
        return reader(row)
    except Refused as refused:
        return refused
