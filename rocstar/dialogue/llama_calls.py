"""Tool calls as Llama 3 writes them: a JSON object with `name` and `parameters` at the start of a line, or after
`<|python_tag|>`; several are separated by line ends or semicolons."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rocstar.dialogue.calls import call_from, malformed
from rocstar.dialogue.segments import Author, Segment, json_segments
from rocstar.types import ToolCall

TAG = "<|python_tag|>"
_START = re.compile(rf'{re.escape(TAG)}[ \t\n]*|(?:^|(?<=[\n;]))[ \t]*(?=\{{\s*"name"\s*:)')
_DECODER = json.JSONDecoder()


class LlamaCalls:
    """A line of an answer that begins as a call does is taken for one. Text behind a call that does not parse belongs
    to it, because nothing says where it ends."""

    reserved = (TAG,)

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        return [
            _call(f"call_{first_id + n}", text[begin:end], body) for n, (begin, end, body) in enumerate(_found(text))
        ]

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        return tuple(json_segments({"name": tool, "parameters": dict(arguments)}, Author.ASSISTANT))

    def strip(self, text: str) -> str:
        kept, place = [], 0
        for begin, end, _ in _found(text):
            kept.append(text[place:begin].removesuffix(TAG))
            place = end
        return "".join((*kept, text[place:]))


LLAMA = LlamaCalls()


def _found(text: str) -> Iterator[tuple[int, int, Any]]:
    """Start, end and decoded body of each call; the body is a complaint (text) where it does not parse, and the call
    is then the last one."""
    place = 0
    while start := _START.search(text, place):
        try:
            body, place = _DECODER.raw_decode(text, start.end())
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError too
            yield start.end(), len(text), "nested too deeply" if isinstance(error, RecursionError) else str(error)
            return
        yield start.end(), place, [body]


def _call(call_id: str, raw: str, body: Any) -> ToolCall:
    return malformed(call_id, raw, body) if isinstance(body, str) else call_from(body[0], call_id, raw, "parameters")
