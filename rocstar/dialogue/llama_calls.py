"""Tool calls as Llama 3 writes them: JSON objects with `name` and `parameters`, with `<|python_tag|>` before them
or without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rocstar.dialogue.calls import TOO_DEEP, Found, call_from, without
from rocstar.dialogue.segments import Author, Segment, json_segments
from rocstar.types import ToolCall

TAG = "<|python_tag|>"
MOST_FAILURES = 1000
"""Objects that are no JSON, in one text; each costs a look at all the text before it. Ours."""
_START = re.compile(rf'{re.escape(TAG)}[\s\[]*+|(?=\{{\s*+"(?:[^"\\\n]++|\\.)*+"\s*:)')
_CALLING = re.compile(r'\{\s*"(?:(?:name|parameters|arguments)"\s*:|type"\s*:\s*"function")')
_DECODER = json.JSONDecoder()


class LlamaCalls:
    """A call is whatever stands behind the tag, and every JSON object, anywhere in the text, that has `name` and
    `parameters` (or `arguments`) or begins as a call does. Text behind a call that does not parse belongs to it,
    because nothing says where it ends."""

    reserved = (TAG,)

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        return [call_from(found, f"call_{first_id + n}", _field(found.body)) for n, found in enumerate(_found(text))]

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        return tuple(json_segments({"name": tool, "parameters": dict(arguments)}, Author.ASSISTANT))

    def strip(self, text: str) -> str:
        return without(text, _found(text))


LLAMA = LlamaCalls()


def _found(text: str) -> Iterator[Found]:
    place = failures = 0
    while start := _START.search(text, place):
        begin = start.end()
        sure = bool(start[0]) or _CALLING.match(text, begin) is not None
        try:
            body, place = _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            failures += 1
            if not sure and failures < MOST_FAILURES:
                place = max(error.pos, begin + 1)  # what was read is not read again: that would cost the square
                continue
            complaint = str(error)
        except RecursionError:
            complaint = TOO_DEEP
        except ValueError as error:  # an integer of thousands of digits
            complaint = str(error)
        else:
            if sure or ("name" in body and _field(body) in body):
                yield Found(start.start(), place, text[begin:place], body)
            continue
        yield Found(start.start(), len(text), text[begin:], complaint=complaint)
        return


def _field(body: Any) -> str:
    """The key of the arguments: `parameters`, or `arguments` where only that is there."""
    return "arguments" if isinstance(body, dict) and "arguments" in body and "parameters" not in body else "parameters"
