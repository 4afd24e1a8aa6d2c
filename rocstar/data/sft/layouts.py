"""Layouts whose rows are requests with the calls that answer them (xlam, magicoder), and the table of all published
layouts of SFT data. A layout turns one row into a conversation; `LAYOUTS` names them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.data.sft.check import readable
from rocstar.data.sft.dialogues import BY_ROW, Row, RowReader, Turns, list_of, mapping_of, messages, text_of
from rocstar.data.sft.format import Chat, Refusal, Refused, Role, call_of, from_columns, tool_spec
from rocstar.protocols import ToolSpec
from rocstar.support.plugins import is_reference, load

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


# Magicoder's OSS-Instruct (`problem`, `solution`, `lang`) and Evol-Instruct (`instruction`, `response`): the one Python
# program of a solution becomes a call of the code tool. It is not run: the row ends with the call. Text before the
# program stays, text after it is removed, because it describes a result the assistant has not seen.

FENCED = re.compile(r"^```[ \t]*([\w+#.-]*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def magicoder(tool: ToolSpec) -> RowReader:
    """tool: runs programs."""

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
        turns.calls([(tool.name, {next(iter(tool.parameters["properties"])): code})])
        return turns.chat([tool])

    return read


def _by_row(read: RowReader) -> Callable[[ToolSpec], RowReader]:
    """A layout that needs nothing but the row."""
    return lambda _: read


LAYOUTS: Mapping[str, Callable[[ToolSpec], RowReader]] = {
    **{read.__name__: _by_row(read) for read in (*BY_ROW, xlam)},
    "magicoder": magicoder,
}
"""By name: what makes the reader of rows, given the tool that runs programs."""


def reader_of(layout: str, code_tool: ToolSpec) -> RowReader:
    """The reader of a layout of `LAYOUTS`, or of a function of the user's own that makes a row in the layout `messages`
    of a row. Raises ConfigError."""
    if not is_reference(layout):
        return LAYOUTS[layout](code_tool)
    own = load(layout, setting="layout")

    def read(row: Row) -> Chat:
        try:
            made = own(row)
        except Exception as error:
            raise Refused(Refusal.LAYOUT, "line", f"{layout} raised {error!r}") from None
        if not isinstance(made, dict):
            raise Refused(Refusal.LAYOUT, "line", f"{layout} returned {type(made).__name__}, not a row with messages")
        return messages(made)

    return read


def conversation(reader: RowReader, row: Any) -> Chat | Refused:
    """The conversation of a row, or its refusal."""
    try:
        if not isinstance(readable(row), dict):
            raise Refused(Refusal.LAYOUT, "line", f"expected an object with fields, got {type(row).__name__}")
        return reader(row)
    except Refused as refused:
        return refused
