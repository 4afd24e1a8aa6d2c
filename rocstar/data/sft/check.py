"""Whether a conversation may be learned from: roles, words, calls, and that its text reads back as what was meant.

Raises Refused with the reason; the number returned counts calls that were held against a schema."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from rocstar.data.sft.format import Conversation, Message, Role
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.render import Piece
from rocstar.data.sft.schema import check_call
from rocstar.dialogue.calls import parse_calls
from rocstar.protocols import TextCodec
from rocstar.types import SftRow


def check(conversation: Conversation, markers: Sequence[str]) -> int:
    """Everything but tokens; the number of calls validated. `markers` are strings that no text may hold."""
    check_roles(conversation.messages)
    for message in conversation.messages:
        _check_text(message, markers)
    specs = {tool.name: tool for tool in conversation.tools or ()}
    if len(specs) < len(conversation.tools or ()):
        raise Refused(Reason.TOOLS, "tools", "two tools share a name")
    calls = [call for message in conversation.messages for call in message.calls]
    for call in calls:
        check_call(call.name, call.arguments, specs)
    for message in conversation.messages:
        _check_round_trip(message)
    return len(calls)


def check_roles(messages: Sequence[Message]) -> None:
    """One system message at most, then user and assistant by turns; each call of an assistant message is followed by
    its result, but the last message may end with calls, and must be the assistant's."""
    turns = messages[1:] if messages and messages[0].role is Role.SYSTEM else messages
    if len(turns) < 2:
        raise Refused(Reason.ROLES, "messages", "expected a list of at least two messages")
    expected, calls, results = Role.USER, 0, 0
    for number, message in enumerate(turns):
        if message.role is Role.TOOL and expected is Role.USER and number:
            results += 1
            continue
        if calls != results:
            raise Refused(Reason.ROLES, "messages", _unpaired(calls, results))
        expected = Role.ASSISTANT if calls else expected
        if message.role is not expected:
            raise Refused(Reason.ROLES, "messages", f"expected a message of role {expected}, got {message.role}")
        answers = message.role is Role.ASSISTANT
        calls, results = len(parse_calls(message.text)) if answers else 0, 0
        expected = Role.USER if answers else Role.ASSISTANT
    if turns[-1].role is not Role.ASSISTANT:
        raise Refused(Reason.ROLES, "messages", "the last message must be the assistant's")


def check_tokens(row: SftRow, parts: Sequence[Piece], codec: TextCodec) -> None:
    """That the learned tokens read back as exactly what the assistant writes. Tokenizers that compose characters
    (NFC, as Qwen's) may change how an accent is written, nothing else."""
    learned = codec.decode([t for t, on in zip(row.token_ids, row.loss_mask, strict=True) if on])
    meant = "".join(piece.text for piece in parts if piece.learned)
    if learned != meant and unicodedata.normalize("NFC", learned) != unicodedata.normalize("NFC", meant):
        raise Refused(Reason.LOSS_SPAN, "messages", f"the learned tokens read {learned[:60]!r}...")


def _unpaired(calls: int, results: int) -> str:
    return (
        f"an assistant message with {calls} tool calls is followed by {results} tool messages; give each call its own"
    )


def _check_text(message: Message, markers: Sequence[str]) -> None:
    if not message.content.strip() and not message.calls and message.role is not Role.TOOL:
        raise Refused(Reason.EMPTY, "messages", f"a {message.role} message says nothing")
    texts = [message.content, *(text for call in message.calls for text in _texts(call.arguments))]
    for text in texts:
        found = next((marker for marker in markers if marker in text), None)
        if found:
            raise Refused(Reason.MARKER, "messages", f"a {message.role} message holds {found!r}")
        if not _is_unicode(text):
            raise Refused(Reason.CHARACTERS, "messages", f"a {message.role} message holds half a surrogate pair")


def _texts(value: Any) -> list[str]:
    """Every text inside a JSON value, keys included. Raises Refused for numbers that JSON cannot write."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(Reason.CHARACTERS, "tool_calls", f"an argument holds {value}")
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (str(key), *_texts(inner))]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_round_trip(message: Message) -> None:
    if message.role is not Role.ASSISTANT:
        return
    read = [(call.tool, call.arguments, call.parse_error) for call in parse_calls(message.text)]
    if read != [(call.name, dict(call.arguments), None) for call in message.calls]:
        raise Refused(Reason.ROUND_TRIP, "tool_calls", f"the rendered calls read back as {str(read)[:80]}")
