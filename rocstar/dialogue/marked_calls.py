"""Call syntaxes with marks of their own, one row of MARKED each: Mistral's, DeepSeek's, GLM's, GPT-OSS's. They are read
as vLLM 0.32 reads them, except that what is malformed is a call that says so, where vLLM may take it for text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from rocstar.dialogue.calls import CLOSE, OPEN, TAG, Calls, CallSyntax, Found, Syntax, as_json, as_text, value_at
from rocstar.dialogue.segments import Segment, ours, written
from rocstar.protocols import ToolSpec
from rocstar.types import ToolCall

ID = "call00000"
"""Of every call, where a template shows one: Mistral's want nine letters and digits."""


def typed(syntax: CallSyntax, text: str, first_id: int, specs: Iterable[ToolSpec]) -> list[ToolCall]:
    """The calls of one completion. Where all values are text (in tags), those that the tool's schema does not take as
    text are read as JSON, if they are JSON."""
    calls = syntax.parse(text, first_id)
    if not isinstance(syntax, Syntax) or syntax.write is as_json:
        return calls
    taken = {name: spec.parameters.get("properties", {}) for spec in specs for name in (spec.name, *spec.aliases)}

    def read(tool: str, key: str, text: str) -> Any:
        kinds = {*_kinds(taken.get(tool, {}).get(key))}
        value, _, complaint = value_at(text)
        return text if complaint or not kinds or "string" in kinds else value

    each = (({key: read(call.tool, key, text) for key, text in call.arguments.items()}, call) for call in calls)
    return [replace(call, arguments=arguments) for arguments, call in each]


def _kinds(schema: Any) -> Iterator[str]:
    """The types that a schema names."""
    if isinstance(schema, Mapping):
        named = schema.get("type", ())
        yield from (named,) if isinstance(named, str) else named
        yield from (kind for each in schema.get("anyOf", ()) for kind in _kinds(each))


def turn_of(syntax: CallSyntax, content: Sequence[Segment], calls: Calls) -> tuple[Segment, ...]:
    """An assistant's turn with these calls. Syntaxes without marks for it have a line end before each call."""
    if isinstance(syntax, Syntax):
        before, after = syntax.said[not calls]
        said = (ours(before), *content, ours(after)) if content else ()
        return *said, *(syntax.together(calls) if calls else ())
    parts = [*([content] if content else []), *(syntax.render(tool, arguments) for tool, arguments in calls)]
    return tuple(segment for part in parts for segment in (ours("\n"), *part))[1:]


# Mistral

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = re.compile(rf"(?:{re.escape(TOOL_CALLS)}\s*)+")
_NAME = re.compile(rf"([^{{]*?)(?:{re.escape(ARGS)}|(?={{))\s*")


def _mistral(text: str) -> Iterator[Found]:
    """A call goes from a mark to the end of its JSON, whose strings may hold marks; id and `[ARGS]` may be missing."""
    places, read = [mark.start() for mark in re.finditer(re.escape(TOOL_CALLS), text)], 0
    for begin, end in pairwise([*places, len(text)]):
        start = begin + len(TOOL_CALLS)
        if begin < read:
            continue
        if not (name := _NAME.match(text[start:end])):
            yield Found(begin, end, text[start:end], complaint=f"no {ARGS} after the name")
            continue
        arguments, read, complaint = value_at(text, start + name.end())
        read = end if complaint else read
        body = {"name": name[1].partition(CALL_ID)[0].strip(), "arguments": arguments}
        yield Found(begin, read, text[start:read], body, complaint)


def _mistral_list(text: str) -> Iterator[Found]:
    """A JSON list of calls, or a single one, after the first mark."""
    if mark := _MARKS.search(text):
        value, end, complaint = value_at(text, mark.end())
        for place, body in enumerate(value if isinstance(value, list) else [value]):
            yield Found(end if place else mark.start(), end, text[mark.end() : end], body, complaint)


# DeepSeek

_CALLS, _ENDS, _CALL, _END, _SEP = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_BEGIN = rf"(?:{_CALLS}\s*)?{_CALL}"
_BLOCK = re.compile(rf"{_BEGIN}(.*?)(?:({_END})(?:\s*{_ENDS})?|(?={_BEGIN})|\Z)", re.DOTALL)
_FENCED = re.compile(rf"function{_SEP}([^\n<]+)\n```json\n"), re.compile(rf"\s*\n```({_END})(?:\s*{_ENDS})?")
_PLAIN = re.compile(rf"([^\n<]+){_SEP}"), re.compile(rf"\s*({_END})(?:\s*{_ENDS})?")


def _deepseek(text: str, head: re.Pattern[str], tail: re.Pattern[str]) -> Iterator[Found]:
    """Blocks between their marks, which strings of the JSON may hold too, in a text that says that it calls."""
    place = 0
    while _CALLS in text and (block := _BLOCK.search(text, place)):
        (start, place), complaint = block.span(), f"no {_SEP} between name and arguments"
        if named := head.match(text, block.start(1)):
            arguments, end, fault = value_at(text, named.end())
            complaint = fault or f"no {_END} after the arguments"
            if not fault and (ended := tail.match(text, end)):
                place, raw = ended.end(), text[block.start(1) : ended.start(1)]
                yield Found(start, place, raw, {"name": named[1], "arguments": arguments})
                continue
        yield Found(start, place, block[1], complaint=complaint if block[2] else f"no {_END} after {_CALL}")


# GLM

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_PAIR = re.compile(rf"{_KEY}([^<]*){_KEY_END}\s*{_VALUE}(.*?)({_VALUE_END}|\Z)", re.DOTALL)
_TAGGED = re.compile(rf"{OPEN}((?:{_VALUE}(?:(?!{_VALUE}).)*?{_VALUE_END}|.)*?)({CLOSE}|\Z)", re.DOTALL)


def _glm(text: str) -> Iterator[Found]:
    """A call ends at the first closing tag outside of a value; all values are text."""
    for call in _TAGGED.finditer(text):
        name, pairs, complaint = call[1].partition(_KEY)[0].strip(), _PAIR.findall(call[1]), None
        if not call[2]:
            complaint = f"no {CLOSE} after {OPEN}"
        elif not name or set(name) & set("<{"):
            complaint = f"no name after {OPEN}"
        elif _KEY in _PAIR.sub("", call[1]) or not all(end for *_, end in pairs):
            complaint = f"a key without {_VALUE} and {_VALUE_END}"
        arguments = {key.strip(): value for key, value, _ in pairs}
        yield Found(*call.span(), call[1], {"name": name, "arguments": arguments}, complaint)


def _as_tags(arguments: Mapping[str, Any]) -> Iterator[Segment]:
    for key, value in arguments.items():
        yield from (ours(_KEY), written(key), ours(f"{_KEY_END}\n{_VALUE}"))
        yield from (written(as_text(value)), ours(f"{_VALUE_END}\n"))


# GPT-OSS (harmony)

_CHANNEL, _MESSAGE, _NEXT, _TO, _CALLED = "<|channel|>", "<|message|>", "<|end|><|start|>assistant", "to=", "<|call|>"
FINAL = f"{_CHANNEL}final{_MESSAGE}"
_SAID = re.compile(r"<\|message\|>\s*(.*?)(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL)
_SAID_END = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|\Z)")
_TOLD = rf"(?: {_TO}functions\.([^\s<]+))?"
_HEADER = re.compile(rf"(?:<\|start\|>assistant)?{_TOLD}<\|channel\|>[a-z]+{_TOLD}(?: ?(?:<\|constrain\|>)?\w+)? ?")
_HEADERS = re.compile(r"(?:<\|start\|>assistant|<\|channel\|>\w*|<\|(?:message|end|return)\|>)+")


def _harmony(text: str) -> Iterator[Found]:
    """A call is a message whose header, in its role or its channel, names a function. Strings of its JSON may hold
    marks."""
    place = 0
    while said := _SAID.search(text, place):
        begin, place = place, said.end()
        if _TO in (header := text[begin : said.start()]):
            named = _HEADER.fullmatch(header)
            arguments, end, complaint = value_at(text, said.start(1))
            if not complaint and (ended := _SAID_END.match(text, end)):
                place = ended.end()
            else:
                arguments, _, complaint = value_at(said[1])
            body = {"name": named and (named[1] or named[2]), "arguments": arguments}
            yield Found(begin, place, text[begin:place], body, complaint)


def without_channels(text: str) -> str:
    """What harmony's messages show: the final one, or all of them where there is none; any other text as it is."""
    return _HEADERS.sub("\n", text.rpartition(FINAL)[2]).strip("\n") if _CHANNEL in text else text


_DEEPSEEK = (_CALLS, _CALL, _SEP, _END, _ENDS)
MARKED: Sequence[Syntax] = (
    Syntax(reserved=(TOOL_CALLS, ARGS), read=_mistral, call=(TOOL_CALLS, ARGS, "")),
    Syntax(reserved=(TOOL_CALLS, CALL_ID, ARGS), read=_mistral, call=(TOOL_CALLS, f"{CALL_ID}{ID}{ARGS}", "")),
    *(
        Syntax(
            reserved=(TOOL_CALLS,),
            read=_mistral_list,
            call=('{"name": "', '", "arguments": ', end),
            turn=(f"{TOOL_CALLS}{blank}[", ", ", "]"),
        )
        for blank in (" ", "")
        for end in (f', "id": "{ID}"}}', "}")
    ),
    Syntax(
        reserved=_DEEPSEEK,
        read=partial(_deepseek, head=_FENCED[0], tail=_FENCED[1]),
        call=(f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_END}"),
        turn=(_CALLS, "\n", _ENDS),
    ),
    Syntax(
        reserved=_DEEPSEEK,
        read=partial(_deepseek, head=_PLAIN[0], tail=_PLAIN[1]),
        call=(_CALL, _SEP, _END),
        turn=(_CALLS, "", _ENDS),
    ),
    Syntax(
        reserved=(OPEN, CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
        read=_glm,
        call=(OPEN, "\n", CLOSE),
        turn=("\n", "\n", ""),
        write=_as_tags,
    ),
    Syntax(
        reserved=(_CHANNEL, _MESSAGE),
        read=_harmony,
        call=(f" {_TO}functions.", f"{_CHANNEL}commentary json{_MESSAGE}", ""),
        turn=("", f"{_CALLED}<|start|>assistant", ""),
        said=((f"{_CHANNEL}analysis{_MESSAGE}", _NEXT), (FINAL, "")),
        shown=without_channels,
    ),
)
"""Mistral's newer (without and with ids) and older (with blanks and ids or without), DeepSeek's V3 and V3.1, GLM
4.5's, GPT-OSS's."""
OPENINGS: Mapping[str, str] = {OPEN: CLOSE, TAG: "", TOOL_CALLS: "", _CALLS: _ENDS, f"{_TO}functions.": _CALLED}
"""What begins calls in a text of any syntax, and what ends them; empty where nothing but their JSON does."""
_CALL_MARKS = "|".join(map(re.escape, (*OPENINGS, *(mark for syntax in MARKED for mark in syntax.reserved))))
_TURN_END = re.compile(rf"(?:(?:(?!{_CALL_MARKS})<[|｜][^|｜<>]*[|｜]>|</s>|<end_of_turn>)\s*)+$")


def without_end(text: str) -> str:
    """A turn's text without the marks with which its template ends it."""
    return _TURN_END.sub("", text)
