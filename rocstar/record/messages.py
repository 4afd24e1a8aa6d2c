"""Chat messages that others wrote, as the turns that a row of attempts holds: calls with their results, and whatever
else was said. Read are OpenAI's form, the flat calls of verifiers and inspect_ai, and the roles `text`, `code` and
`execution` (MathCoder).

Not here: our attempts as messages (formats.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from rocstar.errors import DataError
from rocstar.record.call_errors import error_of_output
from rocstar.types import Status

WRITTEN = ("assistant", "code")
"""Roles of what the policy wrote; `code` is a program, and nothing else."""
RESULTS = ("tool", "function", "ipython", "execution")
Fields = dict[str, Any]


def turns_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Fields], list[str]]:
    """Turns and their texts; what anybody else said stands in a turn's `replies`. A result belongs to the call whose id
    it names, else to the first call of its turn that has none. Raises DataError for a call that is no JSON, and what
    messages of another shape lead to."""
    turns, texts = list[Fields](), list[str]()
    for message in messages:
        role = message["role"]
        if role in WRITTEN or not turns:
            calls = [_call(one, place) for place, one in enumerate(_asked(message) if role in WRITTEN else ())]
            texts.append(said_in(message) if role == "assistant" else "")
            size = len(texts[-1])
            segments = [[0, size, None]] * (size > 0) + [[size, size, number] for number in range(len(calls))]
            held = {"segments": segments, "calls": calls, "results": [None] * len(calls), "replies": []}
            turns.append({"finish": "stop", "version_spans": [], **held})
        if role in WRITTEN:
            continue
        turn, asked = turns[-1], message.get("tool_call_id")
        free = [place for place, result in enumerate(turn["results"]) if result is None]
        named = [place for place in free if turn["calls"][place]["id"] == asked]
        if role in RESULTS and free:
            turn["results"][(named or free)[0]] = _result(message)
        else:
            turn["replies"].append({"role": role, "text": said_in(message)})
    return turns, texts


def _asked(message: Mapping[str, Any]) -> Sequence[Any]:
    code = {"name": "python", "arguments": said_in(message)} if message["role"] == "code" else None
    return [code] if code else message.get("tool_calls") or ()


def _call(call: Any, place: int) -> Fields:
    """OpenAI's form, also as JSON in a text, and the flat forms of verifiers and inspect_ai."""
    call = parsed(call) if isinstance(call, str) else call
    inner = call["function"] if isinstance(call.get("function"), dict) else {"name": call.get("function"), **call}
    arguments = given = inner.get("arguments")
    with suppress(DataError):
        arguments = parsed(given) if isinstance(given, str) else given
    told = {"id": call.get("id") or f"call_{place}", "tool": inner["name"], "parse_error": call.get("parse_error")}
    return {**told, "arguments": arguments if isinstance(arguments, dict) else {}, "raw": as_text(given)}


def _result(message: Mapping[str, Any]) -> Fields:
    """A call has failed where the log says so, or the text is that of a traceback or a time-out."""
    text, error = said_in(message), message.get("error") or {}
    failed = error.get("message") or (text if error_of_output(text) else "")
    status = Status.CODE_ERROR if failed or error else Status.OK
    return {"status": status, "stdout": "" if failed == text else text, "stderr": failed}


def said_in(message: Mapping[str, Any]) -> str:
    """The text of a message, reasoning between tags; parts of other kinds as JSON."""
    content, thought = message.get("content") or "", message.get("reasoning_content")
    parts = content if isinstance(content, list) else [content]
    return "\n".join(map(_part, [{"type": "reasoning", "reasoning": thought}, *parts] if thought else parts))


def _part(part: Any) -> str:
    if isinstance(part, str) or part.get("type") not in ("text", "reasoning"):
        return as_text(part)
    return str(part["text"]) if part["type"] == "text" else f"<think>{part['reasoning']}</think>"


def parsed(text: bytes | str) -> Any:
    """What JSON says, also with NaN; half a surrogate pair, which parquet cannot hold, becomes a question mark. Raises
    DataError."""
    with suppress(ValueError):
        return msgspec.json.decode(text)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"all: it is no JSON ({error})") from None
    return json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))


def written(value: Any) -> str:
    """As JSON; what has no form in it as its text."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def as_text(value: Any) -> str:
    """A text as it is, nothing as an empty one, else JSON."""
    return "" if value is None else value if isinstance(value, str) else written(value)
