"""Layouts whose rows are requests with the calls that answer them (xlam, seal_tools, magicoder) or need other files
(api_bank), and the table of all published layouts of SFT data. A layout turns one row into a conversation; `LAYOUTS`
names them."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.data.rows import rows_and_faults
from rocstar.data.sft.check import readable
from rocstar.data.sft.dialogues import (
    BY_ROW,
    Row,
    RowReader,
    Turns,
    list_of,
    mapping_of,
    speaker_of,
    text_of,
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
from rocstar.dialogue.calls import as_text
from rocstar.errors import ConfigError, DataError
from rocstar.protocols import ToolSpec
from rocstar.types import seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutContext:
    """Further inputs of a layout besides the row."""

    files: tuple[Path, ...]
    """The source's own files, for layouts that must read all rows first."""
    tool_files: tuple[Path, ...] = ()
    """Files with tools described separately from the rows."""
    other_tools: int = 0
    """Number of tools offered besides the called ones, if a source describes tools separately."""
    seed: int = 0
    """For the choice of other tools."""
    code_tool: ToolSpec
    """The tool that runs programs."""


def companion_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Rows of files beside the source's own; here a bad row ends everything. Raises DataError."""
    for file in files:
        for number, row in rows_and_faults(file):
            if not isinstance(row, dict):
                raise DataError(f"{file}:{number} is not a JSON object; correct the line or remove the file")
            yield row


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
    cleaned = {key: value for key, value in column.items() if key != "default" or value not in ("", None)}
    return cleaned | ({"type": column["type"].split(",")[0]} if isinstance(column.get("type"), str) else {})


# Seal-Tools: `query` and `calling`; tools are described in a file of their own (`tool.jsonl`).
#
#     calling  [{"api": "getNews", "parameters": {"country": "us"}, "responses": ["API_call_0"]}]
#
# A row is one request answered by calls made at once. Where an argument is another call's `API_call_n`, the calls
# depend on unknown results, and the row is refused. Each conversation is offered the tools it calls and some
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
            raise Refused(Refusal.PLACEHOLDER, "calling", f"{call.name} is given {unknown[0]}, an unknown result")
        if call.name not in tools:
            raise Refused(Refusal.UNKNOWN_TOOL, "calling", f"tool_files describe no {call.name!r}")
    return calls


# API-Bank, level 1 and 2: `turns` of User, AI and API, one dialogue a row.
#
#     {"role": "API", "api_name": "AddAgenda", "param_dict": {...}, "result": {"output": ..., "exception": null}}
#
# `param_dict` holds what the dialogue's writer typed, often as text (`"2"`, `"['John']"`); `result.input` holds the
# same arguments as the API took them (`2`, `["John"]`), and those are learned.
#
# The dialogues come without tool schemas. They are assembled from the data: results of the tool searches (name,
# description, parameters), else the parameters seen in all calls of the same name, required where every call gives
# them. A check of a call against the latter can only find contradictions with other calls. A dialogue is offered the
# tools that its file is named after (`AddAgenda-AddAlarm-level-1-1.jsonl`) and those it calls.

API_BANK = {"User": Role.USER, "AI": Role.ASSISTANT, "API": Role.TOOL}
API_BANK_LEVEL = re.compile(r"-level-\d.*$")
TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def api_bank(context: LayoutContext) -> RowReader:
    """Reads the files once for their tools, before the first row."""
    tools = _api_tools(context.files)

    def read(row: Row) -> Chat:
        named = API_BANK_LEVEL.sub("", Path(str(row.get("file", ""))).name).split("-")
        turns, offered = Turns(), [name for name in named if name in tools]
        for turn in list_of(row, "turns"):
            fields = mapping_of(turn, "turns")
            role = API_BANK[speaker_of(fields.get("role"), "turns", API_BANK)]
            if role is Role.TOOL:
                name = text_of(fields, "api_name")
                turns.calls([FunctionCall(name=name, arguments=_api_arguments(fields))])
                result = mapping_of(fields.get("result"), "result")
                failed = result.get("exception")
                turns.add(Role.TOOL, f"Error: {failed}" if failed else as_text(result.get("output")))
                offered.append(name)
            else:
                turns.add(role, text_of(fields, "text"))
        return turns.chat([tools[name] for name in dict.fromkeys(offered)])

    return read


def _api_arguments(turn: Row) -> Mapping[str, Any]:
    """The arguments as the API took them. Raises Refused if they differ from those written."""
    written = mapping_of(turn.get("param_dict"), "param_dict")
    taken = mapping_of(turn.get("result"), "result").get("input")
    if not isinstance(taken, Mapping):
        return written
    if {key: str(value) for key, value in taken.items()} != {key: str(value) for key, value in written.items()}:
        raise Refused(Refusal.NO_RESULT, "result", f"is the result of other arguments: {str(taken)[:60]}")
    return taken


def _api_tools(files: Sequence[Path]) -> dict[str, ToolSpec]:
    described: dict[str, Mapping[str, Any]] = {}
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for turn in _api_turns(files):
        with suppress(Refused):  # reported at its row
            by_name[text_of(turn, "api_name")].append(_api_arguments(turn))
        result = turn.get("result")
        output = result.get("output") if isinstance(result, Mapping) else None
        for tool in output if isinstance(output, list) else [output]:  # the results of a tool search
            if isinstance(tool, Mapping) and isinstance(tool.get("input_parameters"), Mapping) and "name" in tool:
                described[tool["name"]] = tool
    return {name: _api_tool(name, calls, described.get(name, {})) for name, calls in by_name.items()}


def _api_turns(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        for _, row in rows_and_faults(file):
            turns = row.get("turns") if isinstance(row, Mapping) else None
            yield from (t for t in turns or () if isinstance(t, Mapping) and t.get("role") == "API" and "api_name" in t)


def _api_tool(name: str, calls: Sequence[Mapping[str, Any]], described: Mapping[str, Any]) -> ToolSpec:
    """Parameters have their commonest type, unless a tool search described them."""
    kinds: dict[str, Counter[type]] = defaultdict(Counter)
    for arguments in calls:
        for key, value in arguments.items():
            kinds[key][type(value)] += 1
    commonest = {key: found.most_common(1)[0][0] for key, found in kinds.items()}
    plain = {key: {"type": TYPE_NAMES[kind]} if kind in TYPE_NAMES else {} for key, kind in commonest.items()}
    columns: dict[str, Any] = {**plain, **described.get("input_parameters", {})}
    required = [column for column in columns if all(column in arguments for arguments in calls)]
    return from_columns(name, described.get("description"), columns, required)


# Magicoder's OSS-Instruct (`problem`, `solution`, `lang`) and Evol-Instruct (`instruction`, `response`): the one Python
# program of a solution becomes a call of the code tool. It is not run: the row ends with the call. Text before the
# program stays, text after it is removed, because it describes a result the assistant has not seen.

FENCED = re.compile(r"^```[ \t]*([\w+#.-]*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def magicoder(context: LayoutContext) -> RowReader:
    tool = context.code_tool

    def read(row: Row) -> Chat:
        request, answered = ("problem", "solution") if "problem" in row else ("instruction", "response")
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
        turns = Turns(text_of(row, request))
        if before := response[: blocks[0].start()].strip():
            turns.add(Role.ASSISTANT, before)
        turns.calls([FunctionCall(name=tool.name, arguments={next(iter(tool.parameters["properties"])): code})])
        return turns.chat([tool])

    return read


def _by_row(read: RowReader) -> Callable[[LayoutContext], RowReader]:
    """A layout that needs nothing but the row."""
    return lambda _: read


LAYOUTS: Mapping[str, Callable[[LayoutContext], RowReader]] = {
    **{read.__name__: _by_row(read) for read in (*BY_ROW, xlam)},
    **{make.__name__: make for make in (seal_tools, api_bank, magicoder)},
}


def conversation(reader: RowReader, row: Any) -> Chat | Refused:
    """The conversation of a row, or its refusal."""
    try:
        if not isinstance(readable(row), dict):
            raise Refused(Refusal.LAYOUT, "line", f"expected an object with fields, got {type(row).__name__}")
        return reader(row)
    except Refused as refused:
        return refused
