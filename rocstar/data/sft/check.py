"""Check whether a conversation may be learned from: roles, texts, calls against their schemas, and that its text parses
back to the same calls. Also loads the rows that training learns from.

Calls are held against a small part of JSON schema: known name, required arguments present, no unknown ones, types,
enums, and the same inside objects and lists. Formats, ranges, patterns and `anyOf` are not looked at."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocstar.data.rows import rows_and_faults
from rocstar.data.sft.format import HALF_PAIR, Chat, Message, Refusal, Refused, Role, conversation_of
from rocstar.data.sft.render import Piece
from rocstar.dialogue.calls import HERMES, LLAMA
from rocstar.dialogue.marked_calls import OPENINGS
from rocstar.errors import DataError
from rocstar.protocols import TextCodec, ToolSpec
from rocstar.types import SftRow

_PYTHON: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
UNPAIRED = "an assistant message with {} tool calls is followed by {} tool messages; give each call its own"


def load_conversations(path: Path, tool_name: str) -> list[Chat]:
    """All conversations of a file to train on; the first bad row raises. `tool_name` is used for calls without a name.
    Raises DataError naming file, line and field."""
    chats = []
    for number, row in rows_and_faults(path):
        try:
            chat = conversation_of(readable(row), tool_name=tool_name)
            check_roles(chat.messages)
        except Refused as refused:
            reason = refused.detail if refused.reason is Refusal.NOT_JSON else str(refused)
            raise DataError(f"{path}, line {number}: {reason}") from None
        chats.append(chat)
    if not chats:
        raise DataError(f"{path} holds no conversation")
    return chats


def readable(row: Any) -> Any:
    """The row. Raises Refused if it could not be read."""
    if isinstance(row, DataError):
        detail = f"is not JSON: {row.__cause__}" if row.__cause__ else str(row)
        raise Refused(Refusal.NOT_JSON, "line", detail)
    return row


def check(conversation: Chat, markers: Sequence[str]) -> int:
    """Check everything but tokens; return the number of calls validated. `markers`: strings that no text may contain.
    Raises Refused."""
    check_roles(conversation.messages)
    for message in conversation.messages:
        _check_text(message, markers)
    specs = {tool.name: tool for tool in conversation.tools or ()}
    if len(specs) < len(conversation.tools or ()):
        raise Refused(Refusal.TOOLS, "tools", "two tools share a name")
    calls = [call for message in conversation.messages for call in message.calls]
    for name, arguments in calls:
        check_call(name, arguments, specs)
    for message in conversation.messages:
        if message.role is Role.ASSISTANT:
            read = [(call.tool, call.arguments, call.parse_error) for call in HERMES.parse(message.text)]
            if read != [(name, dict(arguments), None) for name, arguments in message.calls]:
                raise Refused(Refusal.ROUND_TRIP, "tool_calls", f"the rendered calls read back as {str(read)[:80]}")
    return len(calls)


def check_roles(messages: Sequence[Message]) -> None:
    """One system message at most, then user and assistant by turns; each call of an assistant message is followed by
    its result, but the last message may end with calls, and must be the assistant's."""
    turns = messages[1:] if messages and messages[0].role is Role.SYSTEM else messages
    if len(turns) < 2:
        raise Refused(Refusal.ROLES, "messages", "expected a list of at least two messages")
    expected, results = Role.USER, 0
    calls: int | None = 0  # None for those in a text, in the syntax of a model's template: any number
    for number, message in enumerate(turns):
        if message.role is Role.TOOL and expected is Role.USER and number:
            results += 1
            continue
        if calls not in (None, results):
            raise Refused(Refusal.ROLES, "messages", UNPAIRED.format(calls, results))
        expected = Role.ASSISTANT if results else expected
        if message.role is not expected:
            raise Refused(Refusal.ROLES, "messages", f"expected a message of role {expected}, got {message.role}")
        answers = message.role is Role.ASSISTANT
        calls, results = len(HERMES.parse(message.text)) if answers else 0, 0
        if answers and not calls and (any(mark in message.text for mark in OPENINGS) or LLAMA.parse(message.text)):
            calls = None
        expected = Role.USER if answers else Role.ASSISTANT
    if turns[-1].role is not Role.ASSISTANT:
        raise Refused(Refusal.ROLES, "messages", "the last message must be the assistant's")


def check_tokens(row: SftRow, parts: Sequence[Piece], codec: TextCodec) -> None:
    """Check that the learned tokens decode to exactly the assistant's text. Tokenizers that compose characters (NFC, as
    Qwen's) may change how an accent is written, nothing else."""
    learned = codec.decode([t for t, on in zip(row.token_ids, row.loss_mask, strict=True) if on])
    meant = "".join(piece.text for piece in parts if piece.learned)
    if learned != meant and unicodedata.normalize("NFC", learned) != unicodedata.normalize("NFC", meant):
        raise Refused(Refusal.LOSS_SPAN, "messages", f"the learned tokens read {learned[:60]!r}...")


def _check_text(message: Message, markers: Sequence[str]) -> None:
    if not message.content.strip() and not message.calls and message.role is not Role.TOOL:
        raise Refused(Refusal.EMPTY, "messages", f"a {message.role} message says nothing")
    texts = [message.content, *(text for _, arguments in message.calls for text in _texts(arguments))]
    for text in texts:
        found = next((marker for marker in markers if marker in text), None)
        if found:
            raise Refused(Refusal.MARKER, "messages", f"a {message.role} message holds {found!r}")
        if HALF_PAIR.search(text):
            raise Refused(Refusal.CHARACTERS, "messages", f"a {message.role} message holds half a surrogate pair")


def _texts(value: Any) -> list[str]:
    """Every text inside a JSON value, keys included. Raises Refused for numbers that JSON cannot write."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(Refusal.CHARACTERS, "tool_calls", f"an argument holds {value}")
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (str(key), *_texts(inner))]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []


def check_call(name: str, arguments: Mapping[str, Any], tools: Mapping[str, ToolSpec]) -> None:
    """Raises Refused with the error of a call, naming the argument."""
    if name not in tools:
        known = ", ".join(tools) or "none"
        raise Refused(Refusal.UNKNOWN_TOOL, "tool_calls", f"no tool is called {name!r}; there is {known}")
    _check_object(f"tool_calls.{name}", arguments, {"additionalProperties": False, **tools[name].parameters})


def _check_object(field: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties") or {}
    # An inner object that lists no properties may hold anything; one that lists some, nothing else.
    closed = not schema.get("additionalProperties", not properties)
    for name in schema.get("required", ()):
        if name not in value:
            raise Refused(Refusal.MISSING_ARGUMENT, field, f"required argument {name!r} is missing")
    for name, inner in value.items():
        if name in properties:
            _check_value(f"{field}.{name}", inner, properties[name])
        elif closed:
            known = ", ".join(properties) or "none"
            raise Refused(Refusal.UNKNOWN_ARGUMENT, field, f"argument {name!r} is not among {known}")


def _check_value(field: str, value: Any, schema: Mapping[str, Any]) -> None:
    declared = schema.get("type")
    kinds = declared if isinstance(declared, list) else [declared] if isinstance(declared, str) else []
    if kinds and not any(_is(value, kind) for kind in kinds):
        found = f"{type(value).__name__} {str(value)[:40]!r}"
        raise Refused(Refusal.ARGUMENT_TYPE, field, f"expected {' or '.join(kinds)}, got {found}")
    options = schema.get("enum")
    if isinstance(options, list) and options and not isinstance(value, list) and value not in options:
        raise Refused(Refusal.ARGUMENT_VALUE, field, f"{str(value)[:40]!r} is not among {str(options)[:80]}")
    if isinstance(value, Mapping):
        _check_object(field, value, schema)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for inner in value:
            _check_value(f"{field}[]", inner, schema["items"])


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _PYTHON[kind]) if kind in _PYTHON else True
