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
Also here: the reasons why a row is refused, and tool schemas, whose types sources write in many words. Not here:
whether a row makes sense (`check.py`)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rocstar.dialogue.calls import render_call
from rocstar.errors import DataError
from rocstar.protocols import ToolSpec, tool_schema

HALF_PAIR = re.compile("[\ud800-\udfff]")


class Refusal(StrEnum):
    """Why a row is left out: one for each kind of fault, counted in the datasheet."""

    NOT_JSON = "not_json"  # the line cannot be read
    LAYOUT = "layout"  # a field is missing or of another kind than in the layout
    TOOLS = "tools"  # the list of tools cannot be read, or names one tool twice
    CALL = "call"  # a call cannot be read
    ROLES = "roles"  # messages do not alternate as in a conversation
    EMPTY = "empty"  # a message is empty
    MARKER = "marker"  # a text holds a marker of the template or a special token, which would forge a turn
    CHARACTERS = "characters"  # text that is not Unicode, a number that JSON cannot write
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_ARGUMENT = "missing_argument"
    UNKNOWN_ARGUMENT = "unknown_argument"
    ARGUMENT_TYPE = "argument_type"
    ARGUMENT_VALUE = "argument_value"  # outside the schema's enum
    NO_ANSWER = "no_answer"  # the source gives no answer to learn
    NO_RESULT = "no_result"  # calls whose results the source lacks
    CODE = "code"  # not exactly one Python program, or one that does not parse
    REASONING = "reasoning"  # a reasoning trace, which non-reasoning SFT leaves out on purpose
    ROUND_TRIP = "round_trip"  # the rendered calls do not read back as the same calls
    LOSS_SPAN = "loss_span"  # the learned tokens do not decode to the assistant's text
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    REWRITE = "rewrite"  # the endpoint refused the row, or its answer was empty or cut


class Refused(DataError):
    """One row is refused, which does not end a build. If one bad row must end everything (training), it is raised as a
    DataError."""

    def __init__(self, reason: Refusal, field: str, detail: str) -> None:
        super().__init__(f"field {field}: {detail}")
        self.reason = reason
        self.field = field
        self.detail = detail
        """The finding, one sentence."""


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


FunctionCall = tuple[str, Mapping[str, Any]]
"""(name, arguments) of a tool call of an assistant message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str
    calls: tuple[FunctionCall, ...] = ()
    """Assistant only; rendered after the content."""

    @property
    def text(self) -> str:
        """The text under this role, calls in their tags: for the assistant, exactly what it must learn."""
        rendered = (render_call(name, arguments) for name, arguments in self.calls)
        return "\n".join(part for part in (self.content, *rendered) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation and the tools that are offered in it."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] | None
    """The assistant's tools; None for the reader's own tool."""
    source: str = ""
    """Name of the source it came from."""

    @property
    def id(self) -> str:
        """16 hex digits, the same for equal messages and tools whatever the source."""
        row = {key: value for key, value in row_of(self).items() if key != "source"}
        return hashlib.sha256(dumped(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def row_of(conversation: Chat) -> dict[str, Any]:
    """The conversation as a JSON object; calls are numbered `call_0`, `call_1` ... through the conversation."""
    row: dict[str, Any] = {"messages": _message_rows(conversation.messages)}
    if conversation.tools is not None:
        row["tools"] = [tool_schema(tool) for tool in conversation.tools]
    return row | ({"source": conversation.source} if conversation.source else {})


def dumped(row: Mapping[str, Any]) -> str:
    """One line of a file of rows; keys stay in their order, so equal rows are equal bytes."""
    return json.dumps(row, ensure_ascii=False)


def conversation_of(row: Any, *, tool_name: str = "") -> Chat:
    """Read a row back. `tool_name` is used for calls without a name. Raises Refused."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise Refused(Refusal.LAYOUT, "messages", "expected a list of messages")
    tools = row.get("tools")
    return Chat(
        messages=tuple(message_of(message, tool_name=tool_name) for message in messages),
        tools=None if tools is None else tools_of(tools),
        source=str(row.get("source") or ""),
    )


def tools_of(value: Any, field: str = "tools") -> tuple[ToolSpec, ...]:
    """Tools from a list of schemas, or from JSON text that holds one. Raises Refused."""
    listed = decoded(value, field, Refusal.TOOLS) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise Refused(Refusal.TOOLS, field, f"expected a list of tools, got {type(listed).__name__}")
    return tuple(tool_spec(tool, field) for tool in listed)


def message_of(message: Any, *, tool_name: str = "") -> Message:
    """One OpenAI message. Raises Refused."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in set(Role):
        raise Refused(Refusal.ROLES, "messages", f"expected a message of role {', '.join(Role)}, got {role!r}")
    listed = message.get("tool_calls") or [] if role == Role.ASSISTANT else []
    if not isinstance(listed, list):
        raise Refused(Refusal.CALL, "tool_calls", "expected a list")
    calls = tuple(
        call_of(call.get("function") if isinstance(call, Mapping) else None, tool_name=tool_name) for call in listed
    )
    content = message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Refused(Refusal.LAYOUT, "messages", f"expected a message of role {role} with text content")
    return Message(role=Role(role), content=content, calls=calls)


def chat_message(message: Any) -> Message:
    """A message in the form of OpenAI's clients: the content may be a list of text parts, and a system message may be
    called `developer`. Raises Refused."""
    if isinstance(message, Mapping):
        content, role = message.get("content"), message.get("role")
        text = "" if content is None else text_of(content)
        message = {**message, "content": text, "role": Role.SYSTEM if role == "developer" else role}
    return message_of(message)


def text_of(content: Any) -> str:
    """The text of a content that is a text or a list of parts with texts. Raises Refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(Refusal.LAYOUT, "content", f"expected text content, got {content!r:.60}")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise Refused(Refusal.LAYOUT, "content", f"expected text content, got {part!r:.60}")
    return "".join(part["text"] for part in content)


def call_of(function: Any, field: str = "tool_calls", *, tool_name: str = "") -> FunctionCall:
    """A call from `{"name": ..., "arguments": {...}}`; arguments may be JSON text. Raises Refused."""
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        arguments = decoded(arguments, field, Refusal.CALL)
    if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
        raise Refused(Refusal.CALL, field, "expected function.name and function.arguments, which is an object")
    name = function.get("name") or tool_name
    if not isinstance(name, str) or not name:
        raise Refused(Refusal.CALL, field, f"expected a function name, got {name!r}")
    return name, arguments


def decoded(text: str, field: str, reason: Refusal) -> Any:
    """JSON text inside a field. Raises Refused."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(reason, field, f"is not JSON: {error}") from None


def _message_rows(messages: Sequence[Message]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    made = answered = 0  # calls seen so far, and how many of them have a result
    for message in messages:
        row: dict[str, Any] = {"role": str(message.role), "content": message.content}
        if message.role is Role.TOOL:
            row = {"role": "tool", "tool_call_id": f"call_{answered}", "content": message.content}
            answered += 1
        if message.calls:
            row["tool_calls"] = [
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {"name": name, "arguments": dict(arguments)},
                }
                for number, (name, arguments) in enumerate(message.calls, made)
            ]
            answered, made = made, made + len(message.calls)
        rows.append(row)
    return rows


TYPES: Mapping[str, str] = {
    **dict.fromkeys(("string", "str", "char", "text", "date", "datetime"), "string"),
    **dict.fromkeys(("integer", "int", "long", "short", "byte"), "integer"),
    **dict.fromkeys(("number", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "set", "arraylist"), "array"),
    **dict.fromkeys(("object", "dict", "dictionary", "hashmap", "map"), "object"),
    **dict.fromkeys(("null", "none"), "null"),
}
"""Words that sources use for a type. Any other word (`any`) leaves the type open."""


def tool_spec(raw: Any, field: str = "tools") -> ToolSpec:
    """A tool from `{"type": "function", "function": {...}}` or from the inner object alone. Raises Refused."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise Refused(Refusal.TOOLS, field, "expected tools with a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise Refused(Refusal.TOOLS, field, f"{name}: parameters must be an object")
    return ToolSpec(
        name=name,
        description=str(function.get("description") or ""),
        parameters={"type": "object", "properties": {}} | normalised(parameters),
    )


def from_columns(name: str, description: Any, columns: Any, required: Sequence[str]) -> ToolSpec:
    """A tool whose parameters are listed as `{name: {"type": ..., "description": ...}}`. Raises Refused."""
    if not isinstance(columns, Mapping):
        raise Refused(Refusal.TOOLS, "tools", f"{name}: parameters must be an object")
    parameters = {"properties": columns, "required": list(required)}
    return tool_spec({"name": name, "description": description, "parameters": parameters})


def normalised(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with types in JSON schema's words, at every depth; `required` is always a list of known names."""
    schema_out = dict(schema)
    if isinstance(schema_out.get("type"), str):
        word = schema_out.pop("type").strip().lower()
        # `List[int]`, `Tuple[float, float]`, `Dict`: the word before the bracket says the kind.
        schema_out = ({"type": TYPES[word.split("[")[0]]} if word.split("[")[0] in TYPES else {}) | schema_out
    properties = schema_out.get("properties")
    if isinstance(properties, Mapping):
        schema_out["properties"] = {k: normalised(v) if isinstance(v, Mapping) else {} for k, v in properties.items()}
        required = schema_out.get("required")
        schema_out["required"] = [name for name in required if name in properties] if isinstance(required, list) else []
    elif "properties" in schema_out or "required" in schema_out:
        schema_out = {key: value for key, value in schema_out.items() if key not in ("properties", "required")}
    if isinstance(schema_out.get("items"), Mapping):
        schema_out["items"] = normalised(schema_out["items"])
    return schema_out
