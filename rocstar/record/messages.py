"""Converts foreign chat messages to the turns of a row of attempts: calls with their results, and other messages. It
reads OpenAI's form and the flat calls of verifiers and inspect_ai.

Not here: our attempts as messages (formats.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isinf
from typing import Any

import msgspec

from rocstar.errors import DataError
from rocstar.record.call_errors import LIMITS, error_of_output
from rocstar.types import Status, utf8

RESULTS = ("tool", "function", "ipython")
STATUS = {"parsing": Status.BAD_CALL, "timeout": Status.TIMEOUT, "limit": Status.OUTPUT_LIMIT}
"""inspect_ai's kinds of error of a call; all others are CODE_ERROR."""
MARKS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Letters that inspect_ai reads as numbers, capitals only."""
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Words that it reads as numbers, in any case."""
Fields = dict[str, Any]


def turns_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Fields], list[str]]:
    """Turns and their texts; messages of other roles go into a turn's `replies`. A result belongs to the last turn with
    calls: to the call whose id it names, else to the first without a result. Messages of another shape may raise any
    error."""
    turns, texts = list[Fields](), list[str]()
    calling: Fields | None = None  # the last turn with calls
    for message in messages:
        role = message["role"]
        is_written = role == "assistant"
        if is_written or not turns:
            asked = (message.get("tool_calls") or ()) if is_written else ()
            calls = [_call(one, place) for place, one in enumerate(asked)]
            texts.append(text_in(message) if is_written else "")
            size = len(texts[-1])
            segments = [[0, size, None]] * (size > 0) + [[size, size, number] for number in range(len(calls))]
            held = {"segments": segments, "calls": calls, "results": [None] * len(calls), "replies": []}
            turns.append({"finish": "stop", "version_spans": [], **held})
            calling = turns[-1] if calls else calling
        if is_written:
            continue
        turn = calling or turns[-1]
        free = [place for place, result in enumerate(turn["results"]) if result is None]
        named = [place for place in free if turn["calls"][place]["id"] == message.get("tool_call_id")]
        if role in RESULTS and free:
            turn["results"][(named or free)[0]] = _result(message)
        else:
            turns[-1]["replies"].append({"role": role, "text": text_in(message)})
    return turns, texts


def _call(call: Fields, place: int) -> Fields:
    """OpenAI's form, and the flat forms of verifiers and inspect_ai."""
    inner = call["function"] if isinstance(call.get("function"), dict) else {"name": call.get("function"), **call}
    arguments = given = inner.get("arguments")
    with suppress(DataError):
        arguments = parsed(given) if isinstance(given, str) else given
    arguments = arguments if isinstance(arguments, dict) else {}
    fields = {"id": call.get("id") or f"call_{place}", "tool": inner.get("name") or "", "arguments": arguments}
    return {**fields, "raw": as_text(given), "parse_error": call.get("parse_error")}


def _result(message: Mapping[str, Any]) -> Fields:
    """A call has failed if the log marks it, or the text is that of a traceback or a time-out."""
    text, error = text_in(message), message.get("error")
    if isinstance(error, dict) and error:
        stderr, status = as_text(error.get("message")) or text, STATUS.get(str(error.get("type")), Status.CODE_ERROR)
    elif kind := error_of_output(text):
        stderr, status = text, Status.TIMEOUT if kind == LIMITS["timeout"] else Status.CODE_ERROR
    else:
        stderr, status = as_text(error or None), Status.OK
    return {"status": status, "stdout": "" if stderr == text else text, "stderr": stderr}


def mark_of(value: Any) -> float | None:
    """A score as inspect_ai counts it, numbers in a text too; NaN stays NaN, None for all else that is not a finite
    number there."""
    with suppress(OverflowError, ValueError):
        number = MARKS.get(value, WORDS.get(value.lower())) if isinstance(value, str) else None
        if number is None and isinstance(value, str | int | float):
            number = float(value)
        return None if number is None or isinf(number) else number
    return None


def text_in(message: Mapping[str, Any]) -> str:
    """The text of a message, reasoning between tags; parts of other kinds as JSON."""
    content, thought = message.get("content"), message.get("reasoning_content")
    parts = content if isinstance(content, list) else [as_text(content)]
    return "".join(map(_part, [{"type": "reasoning", "reasoning": thought}, *parts] if thought else parts))


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return as_text(part)
    kind = part.get("type", "text" if "text" in part else None)
    if kind == "text":
        return as_text(part.get("text"))
    return f"<think>{part['reasoning']}</think>\n" if "reasoning" in part else f"\n{written(part)}\n"


def parsed(text: bytes | str) -> Any:
    """The value of a JSON text, NaN allowed; half a surrogate pair, which parquet cannot hold, becomes a question mark.
    Raises DataError."""
    with suppress(ValueError):
        return msgspec.json.decode(text)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"all: it is no JSON ({error})") from None
    return json.loads(utf8(json.dumps(found, ensure_ascii=False)))


def written(value: Any) -> str:
    """As JSON; other objects as their text, half a surrogate pair escaped."""
    with suppress(UnicodeEncodeError):
        return msgspec.json.encode(value, enc_hook=str).decode()
    return json.dumps(value, default=str)


def as_text(value: Any) -> str:
    """A text unchanged, None as an empty one, else JSON."""
    return "" if value is None else value if isinstance(value, str) else written(value)
