"""Tool calls in text, read and written: Hermes-style JSON between `<tool_call>` tags. Nothing is run here; Llama's
syntax is in `llama_calls.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rocstar.dialogue.markup import CLOSE, OPEN
from rocstar.dialogue.segments import Author, Segment, json_segments, ours, text_of
from rocstar.types import ToolCall

FAILED = "Failed to decode tool call: "


class CallSyntax(Protocol):
    """How a model writes tool calls."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Strings that mark a call."""
        ...

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        """The calls of one completion, in order, malformed ones included; ids count on from `call_<first_id>`."""
        ...

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        """A call as the model should write it."""
        ...

    def strip(self, text: str) -> str:
        """The text without its calls."""
        ...


class HermesCalls:
    """`<tool_call>` JSON with `name` and `arguments` `</tool_call>`: Qwen's, and that of our own templates."""

    reserved = (OPEN, CLOSE)

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        return parse_calls(text, first_id)

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        body = json_segments({"name": tool, "arguments": dict(arguments)}, Author.ASSISTANT)
        return ours(f"{OPEN}\n"), *body, ours(f"\n{CLOSE}")

    def strip(self, text: str) -> str:
        """A tag that is never closed takes the rest of the text with it, as in `parse`. Linear in the text."""
        kept, place = [], 0
        while (start := text.find(OPEN, place)) >= 0:
            kept.append(text[place:start])
            end = text.find(CLOSE, start + len(OPEN))
            place = len(text) if end < 0 else end + len(CLOSE)
        return "".join((*kept, text[place:]))


HERMES = HermesCalls()


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
    return text_of(HERMES.render(tool, arguments))


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
        return malformed(call_id, raw, f"no {CLOSE} after {OPEN}")
    try:
        body = json.loads(raw)
    except RecursionError:
        return malformed(call_id, raw, "nested too deeply")
    except ValueError as error:  # not only JSONDecodeError: an integer of thousands of digits ends here too
        return malformed(call_id, raw, str(error))
    return call_from(body, call_id, raw, "arguments")


def call_from(body: Any, call_id: str, raw: str, field: str) -> ToolCall:
    """A call from decoded JSON; `field` is the key of its arguments. What is wrong with it becomes `parse_error`."""
    complaint = _complaint(body, field)
    if complaint:
        return malformed(call_id, raw, complaint)
    return ToolCall(id=call_id, tool=body["name"], arguments=body[field], raw=raw)


def malformed(call_id: str, raw: str, complaint: str) -> ToolCall:
    return ToolCall(id=call_id, tool="", arguments={}, raw=raw, parse_error=FAILED + complaint)


def _complaint(body: Any, field: str) -> str | None:
    """What a decoded call lacks, or None."""
    if not isinstance(body, dict):
        return f"expected an object with 'name' and '{field}'"
    for key, kind, article in (("name", str, "a string"), (field, dict, "an object")):
        if key not in body:
            return f"{key!r} is missing"
        if not isinstance(body[key], kind):
            return f"{key!r} must be {article}"
    return None
