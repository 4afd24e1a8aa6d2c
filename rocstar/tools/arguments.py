"""Checks of the model's arguments to a tool, and results of calls that no sandbox ran."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rocstar.types import Status, ToolCall, ToolResult


def bad_call(call: ToolCall, reason: str) -> ToolResult:
    """The call was not run. `reason`: one sentence for the model, which may quote lone surrogates that it wrote."""
    return ToolResult(call_id=call.id, status=Status.BAD_CALL, stderr=reason.encode(errors="replace").decode())


def ran_here(
    call: ToolCall, status: Status, text: str, *, asked: float, began: float, ended: float, most: int | None = None
) -> ToolResult:
    """The result of a call. text: its output if the status is OK, else the error. asked, began, ended: times of
    `time.monotonic`. most: bytes of text to keep; more output is an OUTPUT_LIMIT."""
    whole = text.encode(errors="replace")
    shown = whole[:most].decode(errors="ignore")
    stdout, stderr = (shown, "") if status is Status.OK else ("", shown)
    is_cut = most is not None and len(whole) > most
    return ToolResult(
        call_id=call.id,
        status=Status.OUTPUT_LIMIT if is_cut and status is Status.OK else status,
        stdout=stdout,
        stderr=stderr,
        run_seconds=ended - began,
        queue_seconds=began - asked,
        truncated_bytes=len(whole) - len(shown.encode()),
    )


def wrong_names(given: Collection[str], parameters: Mapping[str, Any]) -> str | None:
    """Describes a missing required argument, or one that the schema does not name; None if there is neither."""
    known = parameters["properties"]
    for name in parameters.get("required", ()):
        if name not in given:
            return f"argument '{name}' is missing"
    for name in given:
        if name not in known:
            return f"unknown argument '{name}'; this tool takes {', '.join(known) or 'no arguments'}"
    return None


def text_arguments(call: ToolCall, parameters: Mapping[str, Any]) -> str | None:
    """Describes an error in a call's arguments under a schema whose properties are all strings, or None.

    An optional argument may also be null."""
    if wrong := call.parse_error or wrong_names(call.arguments, parameters):
        return wrong
    for name, value in call.arguments.items():
        if not isinstance(value, str) and (name in parameters.get("required", ()) or value is not None):
            return f"argument '{name}' must be a string, got {type(value).__name__}"
    return None
