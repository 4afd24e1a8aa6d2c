"""Shared parts of all layouts of SFT data, and the layouts whose rows are complete dialogues: messages, pairs,
nemotron, sharegpt, glaive, toolace. `layouts.py` has the others and the table of all.

A layout only reads; `check.py` decides whether the conversation is sound."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rocstar.data.sft.format import (
    Chat,
    FunctionCall,
    Message,
    Refusal,
    Refused,
    Role,
    call_of,
    conversation_of,
    decoded,
    message_of,
    tool_spec,
    tools_of,
)
from rocstar.dialogue.calls import CLOSE, HERMES, OPEN, as_text
from rocstar.protocols import ToolSpec

Row = Mapping[str, Any]
RowReader = Callable[[Row], Chat]
"""A row of a file -> its conversation. Raises Refused."""


class Turns:
    """Builds messages: calls join the assistant's text before them, each result is a separate message."""

    def __init__(self, question: str | None = None) -> None:
        self._messages: list[Message] = []
        if question is not None:
            self.add(Role.USER, question)

    def add(self, role: Role, *contents: str) -> None:
        self._messages += [Message(role=role, content=content) for content in contents]

    def calls(self, calls: Iterable[FunctionCall]) -> None:
        last = Message(role=Role.ASSISTANT, content="")
        if self._messages and self._messages[-1].role is Role.ASSISTANT:
            last = self._messages.pop()
        self._messages.append(replace(last, calls=(*last.calls, *calls)))

    @property
    def open_calls(self) -> int:
        """Number of calls of the last message without results."""
        return len(self._messages[-1].calls) if self._messages else 0

    def chat(self, tools: Sequence[ToolSpec] = ()) -> Chat:
        return Chat(messages=tuple(self._messages), tools=tuple(tools))


def text_of(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(Refusal.LAYOUT, name, f"expected a text, got {_shown(value)}")
    return value


def list_of(row: Row, name: str) -> list[Any]:
    """A list, or JSON text that holds one."""
    value = row.get(name)
    if isinstance(value, str):
        value = decoded(value, name, Refusal.LAYOUT)
    if not isinstance(value, list):
        raise Refused(Refusal.LAYOUT, name, f"expected a list, got {_shown(value)}")
    return value


def mapping_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(Refusal.LAYOUT, field, f"expected an object, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def speaker_of(speaker: Any, field: str, known: Iterable[str]) -> str:
    if not isinstance(speaker, str) or speaker not in known:
        raise Refused(Refusal.ROLES, field, f"unknown speaker {speaker!r}")
    return speaker


def _json_at(text: str, place: int, field: str) -> tuple[Any, int]:
    """The JSON value at a position of a text, and its end."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise Refused(Refusal.TOOLS, field, f"is not JSON: {error}") from None


# Instruction and chat sets. Rows without a response are kept open: they end with the user, and only the rewriting step
# can answer them.

PROMPTS = ("prompt", "instruction", "question", "problem", "query")
RESPONSES = ("response", "output", "completion", "answer", "solution", "chosen")
THINKING = "detailed thinking"
"""Nemotron's system texts are `detailed thinking on` and `detailed thinking off`: a switch, not an instruction."""


def messages(row: Row) -> Chat:
    """`messages` and, where there are tools, `tools`: OpenAI's form (Tulu 3 and most others) and our own."""
    read = conversation_of(row)
    return replace(read, tools=read.tools or (), source="")


def pairs(row: Row) -> Chat:
    """One column with the prompt and one with the response, under their usual names; Alpaca's `input` follows the
    instruction after an empty line."""
    prompt = text_of(row, next((name for name in PROMPTS if name in row), PROMPTS[0]))
    if row.get("instruction") == prompt and row.get("input"):
        prompt = f"{prompt}\n\n{text_of(row, 'input')}"
    turns = Turns(prompt)
    if answered := next((name for name in RESPONSES if row.get(name) is not None), None):
        turns.add(Role.ASSISTANT, text_of(row, answered))
    return turns.chat()


def nemotron(row: Row) -> Chat:
    """Llama-Nemotron post-training rows: `input` (messages or text), `output`, `system_prompt`, `reasoning`."""
    output = text_of(row, "output")
    if row.get("reasoning") == "on" or "<think>" in output:
        raise Refused(Refusal.REASONING, "output", "the response is a reasoning trace")
    given_input = row.get("input")
    if isinstance(given_input, str):
        turns = [Message(role=Role.USER, content=text_of(row, "input"))]
    elif isinstance(given_input, list):
        turns = [message_of(message) for message in given_input]
    else:
        raise Refused(Refusal.LAYOUT, "input", f"expected messages or a text, got {type(given_input).__name__}")
    system = str(row.get("system_prompt") or "")
    if system and not system.startswith(THINKING):
        turns = [Message(role=Role.SYSTEM, content=system), *turns]
    return Chat(messages=(*turns, Message(role=Role.ASSISTANT, content=output)), tools=())


# ShareGPT with tools: `conversations` of `{"from": ..., "value": ...}` and `tools`, a JSON list or text of one. The
# forms of LLaMA-Factory (Glaive) and APIGen-MT are read, where calls are turns of their own (`function_call`,
# `observation`), and that of Hermes, where they stand in tags inside the assistant's text.

SHAREGPT = {
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "assistant"), Role.ASSISTANT),
    "system": Role.SYSTEM,
    **dict.fromkeys(("observation", "tool", "function_response", "function-response", "tool_response"), Role.TOOL),
    **dict.fromkeys(("function_call", "function-call", "tool_call"), None),
}
"""The role of each speaker; None: its value is a call or a list of calls."""
RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
CALL_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


def sharegpt(row: Row) -> Chat:
    tools = tools_of(row["tools"]) if row.get("tools") else ()
    turns = Turns()
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        turns.add(Role.SYSTEM, system)
    spoken = [_sharegpt_turn(turn) for turn in list_of(row, "conversations")]
    for role, group in groupby(spoken, key=lambda turn: turn[0]):
        values = [value for _, value in group]
        if role is Role.TOOL:
            values = _sharegpt_results(values, turns.open_calls)
        for value in values:
            if role is None:
                listed = decoded(value, "conversations", Refusal.CALL)
                listed = listed if isinstance(listed, list) else [listed]
                turns.calls(call_of(call, "conversations") for call in listed)
            elif role is Role.ASSISTANT and OPEN in value:
                _add_tagged(turns, value)
            elif role is not Role.SYSTEM or "<tools>" not in value:  # Hermes writes our own tools block there
                turns.add(role, value)
    return turns.chat(tools)


def _sharegpt_turn(turn: Any) -> tuple[Role | None, str]:
    fields = mapping_of(turn, "conversations")
    speaker = speaker_of(fields.get("from", fields.get("role")), "conversations", SHAREGPT)
    value = fields.get("value", fields.get("content"))
    if not isinstance(value, str):
        raise Refused(Refusal.LAYOUT, "conversations", f"expected text from {speaker}, got {type(value).__name__}")
    return SHAREGPT[speaker], value


def _sharegpt_results(values: list[str], calls: int) -> list[str]:
    """One text a call: turns of their own, tagged blocks, or one turn that holds a JSON list."""
    tagged = [result for value in values for result in RESPONSE.findall(value)]
    if tagged or len(values) == calls:
        return tagged or values
    listed = decoded(values[0], "conversations", Refusal.NO_RESULT) if len(values) == 1 else values
    if not isinstance(listed, list) or len(listed) != calls:
        raise Refused(Refusal.NO_RESULT, "conversations", f"{calls} calls are answered by {len(values)} turns")
    return [as_text(one) for one in listed]


def _add_tagged(turns: Turns, value: str) -> None:
    found = HERMES.parse(value)
    if broken := next((call.parse_error for call in found if call.parse_error), None):
        raise Refused(Refusal.CALL, "conversations", broken)
    turns.add(Role.ASSISTANT, CALL_BLOCK.sub("", value).strip())
    turns.calls((call.tool, call.arguments) for call in found)


# Glaive function calling v2 as published: `system` and `chat`, two texts with speakers in capitals.
#
#     SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
#     {"name": "get_news", "description": "...", "parameters": {...}}
#
#     USER: Tell me the news.
#     ASSISTANT: <functioncall> {"name": "get_news", "arguments": '{"country": "us"}'} <|endoftext|>
#     FUNCTION RESPONSE: {"headlines": [...]}
#     ASSISTANT: Here they are. <|endoftext|>

GLAIVE_SPEAKER = re.compile(r"(?:^|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
GLAIVE_CALL = "<functioncall>"
GLAIVE_END = "<|endoftext|>"
GLAIVE_QUOTED = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\}\s*)$""", re.DOTALL)
"""Arguments stand as JSON text in single quotes, which no JSON reader takes."""


def glaive(row: Row) -> Chat:
    turns = Turns()
    parts = GLAIVE_SPEAKER.split(text_of(row, "chat"))
    if parts[0].strip():
        raise Refused(Refusal.ROLES, "chat", f"starts with {parts[0].strip()[:40]!r} and no speaker")
    for speaker, speech in zip(parts[1::2], parts[2::2], strict=True):
        words = speech.replace(GLAIVE_END, "").strip()
        if speaker == "ASSISTANT" and GLAIVE_CALL in words:
            before, _, call = words.partition(GLAIVE_CALL)
            if before.strip():
                turns.add(Role.ASSISTANT, before.strip())
            turns.calls([_glaive_call(call.strip())])
        else:
            turns.add({"USER": Role.USER, "ASSISTANT": Role.ASSISTANT}.get(speaker, Role.TOOL), words)
    # The tools follow one another in the system text as JSON objects. What it says around them is left out, because
    # the tools block of the template says the same.
    system, tools = str(row.get("system") or ""), []
    place = system.find("{")
    while place >= 0:
        tool, end = _json_at(system, place, "system")
        tools.append(tool_spec(tool, "system"))
        place = system.find("{", end)
    return turns.chat(tools)


def _glaive_call(text: str) -> FunctionCall:
    if quoted := GLAIVE_QUOTED.search(text):
        inner = quoted[2].replace("\\'", "'")
        text = text[: quoted.start()] + quoted[1] + json.dumps(inner) + quoted[3]
    return call_of(decoded(text, "chat", Refusal.CALL), "chat")


# ToolACE: `system` with the tools as a JSON list in running text, `conversations` whose calls are Python-like.
#
#     assistant  [Market Trends API(trend_type="MARKET_INDEXES", country="us"), newAddress(city="Paris")]
#     tool       [{"name": "Market Trends API", "results": {...}}, {"name": "newAddress", "results": {...}}]
#
# Tool names may hold blanks and dots, so a call list is no Python: names are cut off first, arguments read as Python.

TOOLACE = {"user": Role.USER, "human": Role.USER, "assistant": Role.ASSISTANT, "gpt": Role.ASSISTANT, "tool": Role.TOOL}
JSON_WORDS = {"true": True, "false": False, "null": None}


def toolace(row: Row) -> Chat:
    system = text_of(row, "system")
    # The text around the tools asks for Python-like calls, which would be wrong here.
    place = system.find("[{")
    if place < 0:
        raise Refused(Refusal.TOOLS, "system", "holds no list of tools")
    tools = tools_of(_json_at(system, place, "system")[0], "system")
    turns = Turns()
    for turn in list_of(row, "conversations"):
        fields = mapping_of(turn, "conversations")
        value = text_of(fields, "value").strip()
        role = TOOLACE[speaker_of(fields.get("from"), "conversations", TOOLACE)]
        is_list = value.startswith("[") and value.endswith("]")
        if role is Role.TOOL:
            turns.add(Role.TOOL, *_toolace_results(value, turns.open_calls))
        elif role is Role.ASSISTANT and is_list and any(f"{tool.name}(" in value for tool in tools):
            turns.calls(_toolace_calls(value[1:-1].strip()))
        else:
            turns.add(role, value)
    return turns.chat(tools)


def _toolace_calls(rest: str) -> Iterator[FunctionCall]:
    while rest:
        name, opened, _ = rest.partition("(")
        end = _closing(rest, len(name)) if opened else -1
        if end < 0:
            raise Refused(Refusal.CALL, "conversations", f"cannot read a call in {rest[:60]!r}")
        yield name.strip(), _python_arguments(rest[len(name) : end + 1])
        rest = rest[end + 1 :].lstrip(" \n,")


def _closing(text: str, place: int) -> int:
    """Position where the bracket opened at `place` closes, ignoring strings; -1 if it never does."""
    depth, quote, skip = 0, "", False
    for n in range(place, len(text)):
        letter = text[n]
        if skip:
            skip = False
        elif quote:
            skip, quote = letter == "\\", "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return n
    return -1


def _python_arguments(written: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("arguments without a name")
        return {str(word.arg): _literal(word.value) for word in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Refused(Refusal.CALL, "conversations", f"cannot read arguments {written[:60]!r} ({error})") from None


def _literal(node: ast.expr) -> Any:
    """A literal; JSON's true, false and null count; values that JSON lacks (sets, bytes) do not."""
    if isinstance(node, ast.Name) and node.id in JSON_WORDS:
        return JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(inner) for inner in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        items = zip(node.keys, node.values, strict=True)
        return {str(key.value): _literal(value) for key, value in items if isinstance(key, ast.Constant)}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{type(value).__name__} is not JSON")
    return value


def _toolace_results(value: str, calls: int) -> list[str]:
    """One text a call, in the order of the calls."""
    listed = decoded(value, "conversations", Refusal.NO_RESULT) if value.startswith("[") else [value]
    if len(listed) != calls:
        raise Refused(Refusal.NO_RESULT, "conversations", f"{calls} calls are answered by {len(listed)} results")
    return [as_text(one.get("results", one) if isinstance(one, dict) else one) for one in listed]


BY_ROW: tuple[RowReader, ...] = (messages, pairs, nemotron, sharegpt, glaive, toolace)
