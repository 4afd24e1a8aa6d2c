"""Checks of what the model passed to a tool, and the result that tells it what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rocstar.types import Status, ToolCall, ToolResult


def bad_call(call: ToolCall, reason: str) -> ToolResult:
    """The call was not run. `reason`: one sentence for the model."""
    return ToolResult(call_id=call.id, status=Status.BAD_CALL, stderr=reason)


def text_arguments(call: ToolCall, parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments under a schema whose properties are all strings; None when nothing is.

    An optional argument may also be null."""
    if call.parse_error is not None:
        return call.parse_error
    known, required = parameters["properties"], parameters.get("required", ())
    for name in required:
        if name not in call.arguments:
            return f"argument '{name}' is missing"
    for name, value in call.arguments.items():
        if name not in known:
            return f"unknown argument '{name}'; this tool takes {', '.join(known)}"
        if not isinstance(value, str) and (name in required or value is not None):
            return f"argument '{name}' must be a string, got {type(value).__name__}"
    return None
