"""The one form of an SFT row: OpenAI messages and tools, a JSON object a line.

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "content": "",
                   "tool_calls": [{"id": "call_0", "type": "function",
                                   "function": {"name": "python", "arguments": {"code": "print(3 * 4)"}}}]},
                  {"role": "tool", "tool_call_id": "call_0", "content": "12"},
                  {"role": "assistant", "content": "<answer>\\boxed{12}</answer>"}],
     "tools": [{"type": "function", "function": {"name": "python", "description": "...", "parameters": {...}}}],
     "source": "glaive"}

`arguments` is written as an object, which chat templates take; it is read as an object or as JSON text, which the
OpenAI API sends. A row without `tools` is a demonstration of the reader's own task and tool; `[]` means no tools.
Not here: whether a row makes sense (`check.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import tool_spec
from rocstar.dialogue.calls import render_call
from rocstar.dialogue.template import tool_schema
from rocstar.protocols import ToolSpec


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A tool call of an assistant message."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str
    calls: tuple[FunctionCall, ...] = ()
    """Assistant only; they stand after the content."""

    @property
    def text(self) -> str:
        """What is written under this role, calls in their tags: for the assistant, exactly what it must learn."""
        rendered = (render_call(call.name, call.arguments) for call in self.calls)
        return "\n".join(part for part in (self.content, *rendered) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] | None
    """What the assistant may call; None for the reader's own tool."""
    source: str = ""
    """Name of the source it came from."""

    @property
    def id(self) -> str:
        """16 hex digits, the same for equal messages and tools whatever the source."""
        row = {key: value for key, value in row_of(self).items() if key != "source"}
        return hashlib.sha256(dumped(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def row_of(conversation: Conversation) -> dict[str, Any]:
    """The conversation as a JSON object; calls are numbered `call_0`, `call_1` ... through the conversation."""
    row: dict[str, Any] = {"messages": _message_rows(conversation.messages)}
    if conversation.tools is not None:
        row["tools"] = [tool_schema(tool) for tool in conversation.tools]
    return row | ({"source": conversation.source} if conversation.source else {})


def dumped(row: Mapping[str, Any]) -> str:
    """One line of a file of rows; keys stay in their order, so equal rows are equal bytes."""
    return json.dumps(row, ensure_ascii=False)


def conversation_of(row: Any, *, tool_name: str = "") -> Conversation:
    """Read a row back. `tool_name` stands in where a call names no tool. Raises Refused."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise Refused(Reason.LAYOUT, "messages", "expected a list of messages")
    tools = row.get("tools")
    return Conversation(
        messages=tuple(message_of(message, tool_name=tool_name) for message in messages),
        tools=None if tools is None else tools_of(tools),
        source=str(row.get("source") or ""),
    )


def tools_of(value: Any, field: str = "tools") -> tuple[ToolSpec, ...]:
    """Tools from a list of schemas, or from JSON text that holds one. Raises Refused."""
    listed = decoded(value, field, Reason.TOOLS) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise Refused(Reason.TOOLS, field, f"expected a list of tools, got {type(listed).__name__}")
    return tuple(tool_spec(tool, field) for tool in listed)


def message_of(message: Any, *, tool_name: str = "") -> Message:
    """One OpenAI message. Raises Refused."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in set(Role):
        raise Refused(Reason.ROLES, "messages", f"expected a message of role {', '.join(Role)}, got {role!r}")
    listed = message.get("tool_calls") or [] if role == Role.ASSISTANT else []
    if not isinstance(listed, list):
        raise Refused(Reason.CALL, "tool_calls", "expected a list")
    calls = tuple(call_of(_function(call), tool_name=tool_name) for call in listed)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Refused(Reason.LAYOUT, "messages", f"expected a message of role {role} with text content")
    return Message(role=Role(role), content=content, calls=calls)


def call_of(function: Any, field: str = "tool_calls", *, tool_name: str = "") -> FunctionCall:
    """A call from `{"name": ..., "arguments": {...}}`; arguments may be JSON text. Raises Refused."""
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        arguments = decoded(arguments, field, Reason.CALL)
    if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
        raise Refused(Reason.CALL, field, "expected function.name and function.arguments, which is an object")
    name = function.get("name") or tool_name
    if not isinstance(name, str) or not name:
        raise Refused(Reason.CALL, field, f"expected a function name, got {name!r}")
    return FunctionCall(name=name, arguments=arguments)


def decoded(text: str, field: str, reason: Reason) -> Any:
    """JSON text inside a field. Raises Refused."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(reason, field, f"is not JSON: {error}") from None


def _function(call: Any) -> Any:
    return call.get("function") if isinstance(call, Mapping) else None


def _message_rows(messages: Sequence[Message]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    made = answered = 0  # calls seen so far, and how many of them have a result
    for message in messages:
        row: dict[str, Any] = {"role": str(message.role), "content": message.content}
        if message.role is Role.TOOL:
            row = {"role": "tool", "tool_call_id": f"call_{answered}", "content": message.content}
            answered += 1
        if message.calls:
            row["tool_calls"] = [_call_row(call, made + n) for n, call in enumerate(message.calls)]
            answered, made = made, made + len(message.calls)
        rows.append(row)
    return rows


def _call_row(call: FunctionCall, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}
