"""Checks of what the model passed to a tool, and the result that tells it what was wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rocstar.types import Status, ToolCall, ToolResult


def bad_call(call: ToolCall, reason: str) -> ToolResult:
    """The call was not run. `reason`: one sentence for the model."""
    return ToolResult(call_id=call.id, status=Status.BAD_CALL, stderr=reason)


def wrong_names(given: Collection[str], parameters: Mapping[str, Any]) -> str | None:
    """What is wrong where a required argument of the schema is not given, or one that it does not name."""
    known = parameters["properties"]
    for name in parameters.get("required", ()):
        if name not in given:
            return f"argument '{name}' is missing"
    for name in given:
        if name not in known:
            return f"unknown argument '{name}'; this tool takes {', '.join(known) or 'no arguments'}"
    return None


def text_arguments(call: ToolCall, parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments under a schema whose properties are all strings; None when nothing is.

    An optional argument may also be null."""
    if wrong := call.parse_error or wrong_names(call.arguments, parameters):
        return wrong
    for name, value in call.arguments.items():
        if not isinstance(value, str) and (name in parameters.get("required", ()) or value is not None):
            return f"argument '{name}' must be a string, got {type(value).__name__}"
    return None
