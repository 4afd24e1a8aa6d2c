"""APIGen / xLAM: `query`, `answers` and `tools`, the last two as JSON text.

    tools    [{"name": "f", "description": "...", "parameters": {"x": {"type": "int, optional", "description": "...",
                                                                       "default": 3}}}]
    answers  [{"name": "f", "arguments": {"x": 1}}]

A parameter is required unless its type says `optional` or it has a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocstar.data.sft.format import Conversation, Role, call_of
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, list_of, mapping_of, text_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import from_columns, tool_spec
from rocstar.protocols import ToolSpec


def xlam(_: Surroundings) -> Layout:
    return each(_conversation)


def _conversation(row: Row) -> Conversation:
    turns = Turns()
    turns.add(Role.USER, text_of(row, "query"))
    answers = list_of(row, "answers")
    if not answers:
        raise Refused(Reason.NO_ANSWER, "answers", "holds no call")
    turns.calls([call_of(answer, "answers") for answer in answers])
    return turns.conversation([_tool(tool) for tool in list_of(row, "tools")])


def _tool(raw: Any) -> ToolSpec:
    tool = mapping_of(raw, "tools")
    columns = tool.get("parameters")
    if not isinstance(columns, Mapping) or "properties" in columns or not isinstance(tool.get("name"), str):
        return tool_spec(raw)
    required = [name for name, column in columns.items() if isinstance(column, Mapping) and not _optional(column)]
    plain = {name: _column(column) for name, column in columns.items()}
    return from_columns(tool["name"], tool.get("description"), plain, required)


def _optional(column: Mapping[str, Any]) -> bool:
    return "optional" in str(column.get("type", "")) or "default" in column


def _column(column: Any) -> Any:
    """`int, optional` is `int`; an empty default, which xLAM writes for "none", is left out."""
    if not isinstance(column, Mapping):
        return {}
    kept = {key: value for key, value in column.items() if key != "default" or value not in ("", None)}
    return kept | ({"type": column["type"].split(",")[0]} if isinstance(column.get("type"), str) else {})
