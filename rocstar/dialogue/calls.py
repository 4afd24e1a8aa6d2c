"""Tool calls in text: Hermes-style JSON between `<tool_call>` tags, read and written. Nothing is run here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rocstar.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FAILED = "Failed to decode tool call: "


def parse_calls(text: str, first_id: int = 0) -> list[ToolCall]:
    """The tool calls of one completion, in order, malformed ones included.

    Ids are `call_<first_id>`, `call_<first_id + 1>` ...; pass the number of calls seen before so that they stay
    unique in a trajectory. A tag that is never closed is a malformed call that runs to the end of the text. Time is
    linear in the text. Source: paper §2.1 (parse errors go back to the model); unclosed tags ours, the release
    takes such a turn for an answer.
    """
    return [_call(f"call_{first_id + n}", raw, closed) for n, (raw, closed) in enumerate(_blocks(text))]


def render_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model should write it; `parse_calls` reads it back unless an argument holds the closing tag."""
    body = json.dumps({"name": tool, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Text between tags, and whether the closing tag was there. Plain search, because a non-greedy pattern would
    look for the closing tag from every opening one: quadratic on hostile text."""
    start = text.find(OPEN)
    while start >= 0:
        start += len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            yield text[start:], False
            return
        yield text[start:end], True
        start = text.find(OPEN, end + len(CLOSE))


def _call(call_id: str, raw: str, closed: bool) -> ToolCall:
    if not closed:
        return _malformed(call_id, raw, f"no {CLOSE} after {OPEN}")
    try:
        body = json.loads(raw)
    except RecursionError:
        return _malformed(call_id, raw, "nested too deeply")
    except ValueError as error:  # not only JSONDecodeError: an integer of thousands of digits ends here too
        return _malformed(call_id, raw, str(error))
    complaint = _complaint(body)
    if complaint:
        return _malformed(call_id, raw, complaint)
    return ToolCall(id=call_id, tool=body["name"], arguments=body["arguments"], raw=raw)


def _complaint(body: Any) -> str | None:
    """What a decoded call lacks, or None."""
    if not isinstance(body, dict):
        return "expected an object with 'name' and 'arguments'"
    for key, kind, article in (("name", str, "a string"), ("arguments", dict, "an object")):
        if key not in body:
            return f"{key!r} is missing"
        if not isinstance(body[key], kind):
            return f"{key!r} must be {article}"
    return None


def _malformed(call_id: str, raw: str, complaint: str) -> ToolCall:
    return ToolCall(id=call_id, tool="", arguments={}, raw=raw, parse_error=FAILED + complaint)
