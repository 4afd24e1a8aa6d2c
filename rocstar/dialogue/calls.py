"""Tool calls in text, read and written: as JSON between `<tool_call>` tags (Hermes, Qwen), as tags for each argument
between them (Qwen3.5), and as Llama 3 writes them, JSON objects with `name` and `parameters`, with `<|python_tag|>`
before them or without it. Nothing is run here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rocstar.dialogue.segments import Author, Segment, is_harmless, json_segments, ours, text_of, written
from rocstar.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FAILED = "Failed to decode tool call: "
TOO_DEEP = "nested too deeply"
LONGEST_WORD = 12  # two escapes, "\\ud83d\\ude00": an error so far from the end of a text is none of its end
_DECODER = json.JSONDecoder()
# Up to the first closing tag outside a JSON string. Two scans from different opening tags disagree on what is inside a
# string, so one of them stops early: together they stay linear in the text.
_TO_CLOSE = re.compile(rf'(?:[^"<\\]++|"(?:[^"\\\n]++|\\.)*+")*+(?={CLOSE})')


class CallSyntax(Protocol):
    """How a model writes tool calls."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Strings that mark a call."""
        ...

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        """The calls of one completion, in order, malformed ones included; ids count on from `call_<first_id>`, the
        number of calls before it, so that they stay unique in a trajectory."""
        ...

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        """A call as the model should write it."""
        ...

    def strip(self, text: str) -> str:
        """The text without its calls."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A call in a text, decoded or not."""

    begin: int
    """Its start and end, tags included."""
    end: int
    raw: str
    """The text that should be JSON."""
    body: Any = None
    complaint: str | None = None
    """Why `raw` is not JSON; None if `body` is its value."""
    field: str = "arguments"
    """The key of the call's arguments."""


Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and arguments of each."""


def as_json(arguments: Mapping[str, Any]) -> Iterable[Segment]:
    return json_segments(dict(arguments), Author.ASSISTANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """A CallSyntax by its texts and its reader."""

    reserved: tuple[str, ...]
    read: Callable[[str], Iterator[Found]]
    """The calls of a text, in order, malformed ones included."""
    call: tuple[str, str, str]
    """Text before the name of a call, between name and arguments, and after them."""
    turn: tuple[str, str, str] = ("", "", "")
    """Text before the first call of a turn, between two calls, and after the last."""
    write: Callable[[Mapping[str, Any]], Iterable[Segment]] = as_json
    """Writes the arguments."""
    said: tuple[tuple[str, str], tuple[str, str]] = (("", ""), ("", ""))
    """Text around what is said before calls, and around an answer."""
    shown: Callable[[str], str] = str
    """What people see of a text without calls."""

    def parse(self, text: str, first_id: int = 0) -> list[ToolCall]:
        return [call_from(found, f"call_{first_id + n}") for n, found in enumerate(self.read(text))]

    def strip(self, text: str) -> str:
        pieces, place = [], 0
        for found in self.read(text):
            pieces.append(text[place : found.begin])
            place = found.end
        return self.shown("".join((*pieces, text[place:])))

    def render(self, tool: str, arguments: Mapping[str, Any]) -> tuple[Segment, ...]:
        return self.together([(tool, arguments)])

    def together(self, calls: Calls) -> tuple[Segment, ...]:
        """All calls of one turn."""
        (before, middle, after), (first, between, last) = self.call, self.turn
        parts = [ours(first)]
        for place, (tool, arguments) in enumerate(calls):
            name = (ours if is_harmless(tool) else written)(json.dumps(tool, ensure_ascii=False)[1:-1])
            parts += [ours(between * bool(place) + before), name, ours(middle), *self.write(arguments), ours(after)]
        return *parts, ours(last)


def _in_turn(text: str, first: re.Pattern[str], call: Callable[[str, re.Match[str]], Found]) -> Iterator[Found]:
    """The calls that begin with `first`, each after the end of the one before."""
    place = 0
    while begin := first.search(text, place):
        found = call(text, begin)
        yield found
        place = found.end


def _block(text: str, tag: re.Match[str]) -> Found:
    """The block that begins with this tag."""
    begin, start = tag.span()
    if body := _TO_CLOSE.match(text, start):
        found = decoded(begin, body.end() + len(CLOSE), body[0])
        if found.complaint is None:
            return found
    close = text.find(CLOSE, start)
    if close < 0:
        return Found(begin, len(text), text[start:], complaint=f"no {CLOSE} after {OPEN}")
    following = text.find(OPEN, close)
    close = text.rfind(CLOSE, close, len(text) if following < 0 else following)
    return decoded(begin, close + len(CLOSE), text[start:close])


_lined = partial(Syntax, turn=("", "\n", ""), said=(("", "\n"), ("", "")))
HERMES = _lined(
    reserved=(OPEN, CLOSE),
    read=partial(_in_turn, first=re.compile(OPEN), call=_block),
    call=(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}"),
)
"""`<tool_call>` JSON with `name` and `arguments` `</tool_call>`: Qwen's, and that of our own templates.

A closing tag inside a string of the JSON closes nothing; a block that is not JSON ends at the last closing tag
before the next opening one, an unclosed one at the end of the text. Time is linear in the text. Source: paper §2.1
(parse errors go back to the model); that an unclosed tag is a call is ours: the release treats such a turn as an
answer."""


def render_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model should write it; `HERMES` reads it back."""
    return text_of(HERMES.render(tool, arguments))


def decoded(begin: int, end: int, raw: str) -> Found:
    """The call of this JSON, which lies between `begin` and `end`."""
    body, _, complaint = value_at(raw)
    return Found(begin, end, raw, body, complaint)


def value_at(text: str, start: int | None = None, size: int = 4096) -> tuple[Any, int, str | None]:
    """The JSON value that begins at `start`, or is the whole text; its end; why there is none.

    It is looked for in the next `size` characters, and in more where these cut it: an error of the decoder costs all
    the text before it, so that many in one text would cost its square."""
    piece = text if start is None else text[start : start + size]
    value, end = None, 0
    try:
        value, end = (json.loads(piece), len(piece)) if start is None else _DECODER.raw_decode(piece)
        complaint = None
    except RecursionError:
        complaint = TOO_DEEP
    except json.JSONDecodeError as error:
        complaint, end = str(error), len(piece) if error.msg.startswith("Unterminated") else error.pos
    except ValueError as error:  # an integer of thousands of digits, or the beginning of such a fraction
        complaint, end = str(error), len(piece)
    if start is not None and end > len(piece) - LONGEST_WORD and start + size < len(text):
        return value_at(text, start, 4 * size)
    return value, len(text) if complaint else (start or 0) + end, complaint


def call_from(found: Found, call_id: str) -> ToolCall:
    """An error in the call becomes `parse_error`."""
    complaint = found.complaint or _complaint(found.body, found.field)
    if complaint:
        return ToolCall(id=call_id, tool="", arguments={}, raw=found.raw, parse_error=FAILED + complaint)
    return ToolCall(id=call_id, tool=found.body["name"], arguments=found.body[found.field], raw=found.raw)


def _complaint(body: Any, field: str) -> str | None:
    """Describes a missing part of a decoded call, or None."""
    if not isinstance(body, dict):
        return f"expected an object with 'name' and '{field}'"
    for key, kind, article in (("name", str, "a string"), (field, dict, "an object")):
        if key not in body:
            return f"{key!r} is missing"
        if not isinstance(body[key], kind):
            return f"{key!r} must be {article}"
    return None


# Llama 3

TAG = "<|python_tag|>"
MOST_FAILURES = 1000
"""Most invalid JSON objects in one text; each costs a scan of all the text before it. Ours."""
_START = re.compile(rf'{re.escape(TAG)}[\s\[]*+|(?=\{{\s*+"(?:[^"\\\n]++|\\.)*+"\s*:)')
_CALLING = re.compile(r'\{\s*"(?:(?:name|parameters|arguments)"\s*:|type"\s*:\s*"function")')


def _llama(text: str) -> Iterator[Found]:
    place = failures = 0
    while start := _START.search(text, place):
        begin = start.end()
        sure = bool(start[0]) or _CALLING.match(text, begin) is not None
        try:
            body, place = _DECODER.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            failures += 1
            if not sure and failures < MOST_FAILURES:
                place = max(error.pos, begin + 1)  # parsed text is not parsed again, which would be quadratic
                continue
            complaint = str(error)
        except RecursionError:
            complaint = TOO_DEEP
        except ValueError as error:  # an integer of thousands of digits
            complaint = str(error)
        else:
            if sure or ("name" in body and _field(body) in body):
                yield Found(start.start(), place, text[begin:place], body, field=_field(body))
            continue
        yield Found(start.start(), len(text), text[begin:], complaint=complaint)
        return


LLAMA = _lined(reserved=(TAG,), read=_llama, call=('{"name": "', '", "parameters": ', "}"))
"""A call is any text after the tag, and every JSON object in the text that has `name` and `parameters` (or
`arguments`) or begins like a call. A call that does not parse extends to the end of the text, because its end is
unknown."""


def _field(body: Any) -> str:
    """The key of the arguments: `parameters`, or `arguments` if only that exists."""
    return "arguments" if isinstance(body, dict) and "arguments" in body and "parameters" not in body else "parameters"


# Qwen3.5 and Qwen3-Coder

FUNCTION, END = "<function=", "</function>"
_FIRST, _INSIDE, _OUTER = (re.compile(each) for each in (f"{OPEN}|{FUNCTION}", f"{CLOSE}|{FUNCTION}", rf"\s*{CLOSE}"))
_NEXT = r"<\s*parameter\s*="
# Without `>` there is no name up to the end of the text, and no further one: then a match has no value.
_PARAMETER = re.compile(rf"{_NEXT}\s*([^>]*+)(?:>(.*?)(?:<\s*/\s*parameter\s*>|(?={_NEXT}))|\Z)", re.DOTALL)


def _as_parameters(arguments: Mapping[str, Any]) -> Iterator[Segment]:
    for name, value in arguments.items():
        yield from (ours("<parameter="), written(name), ours(">\n"), written(as_text(value)), ours("\n</parameter>\n"))


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _function(text: str, first: re.Match[str]) -> Found:
    """The call that begins with this tag."""
    begin = start = first.start()
    if first[0] == OPEN:
        inside = _INSIDE.search(text, first.end())
        if inside is None or inside[0] == CLOSE:
            close, end = inside.span() if inside else (len(text), len(text))
            return Found(begin, end, text[first.end() : close], complaint=f"no {FUNCTION}NAME>")
        start = inside.start()
    end = text.find(END, start)
    if end < 0:
        return Found(begin, len(text), text[start:], complaint=f"no {END} after {FUNCTION}")
    end += len(END)
    outer = _OUTER.match(text, end)
    raw, outside = text[start:end], outer.end() if outer else end
    name, closes, rest = raw[len(FUNCTION) : -len(END)].partition(">")
    if not name.strip() or not closes or "<" in name:
        return Found(begin, outside, raw, complaint=f"no name between {FUNCTION} and >")
    parameters = (each.groups() for each in _PARAMETER.finditer(rest))
    arguments = {key: value.removeprefix("\n").removesuffix("\n") for key, value in parameters if value is not None}
    return Found(begin, outside, raw, {"name": name.strip(), "arguments": arguments})


XML = _lined(
    reserved=(OPEN, CLOSE),
    read=partial(_in_turn, first=_FIRST, call=_function),
    call=(f"{OPEN}\n{FUNCTION}", ">\n", f"{END}\n{CLOSE}"),
    write=_as_parameters,
)
"""`<tool_call>` `<function=NAME>` `<parameter=KEY>` value `</parameter>` ... `</function>` `</tool_call>`, read as
vLLM 0.32 does: a call ends at the first `</function>`, a value at the first `</parameter>` or where the next one
begins, without one newline at each of its ends; the outer tags may be missing. All values are text."""
