"""ShareGPT with tools: `conversations` of `{"from": ..., "value": ...}` and `tools`, a JSON list or text of one.

Read are the forms of LLaMA-Factory (Glaive) and APIGen-MT, where calls are turns of their own (`function_call`,
`observation`), and of Hermes, where they stand in tags inside the assistant's text."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role, call_of, decoded, tools_of
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, list_of, mapping_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.dialogue.calls import parse_calls
from rocstar.dialogue.markup import CLOSE, OPEN

SPEAKERS = {
    **dict.fromkeys(("human", "user"), Role.USER),
    **dict.fromkeys(("gpt", "assistant"), Role.ASSISTANT),
    "system": Role.SYSTEM,
    **dict.fromkeys(("observation", "tool", "function_response", "function-response", "tool_response"), Role.TOOL),
}
CALLERS = ("function_call", "function-call", "tool_call")
RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
CALL_BLOCK = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)


def sharegpt(_: Surroundings) -> Layout:
    return each(_conversation)


def _conversation(row: Row) -> Conversation:
    tools = tools_of(row["tools"]) if row.get("tools") else ()
    turns = Turns()
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        turns.add(Role.SYSTEM, system)
    spoken = [_turn(turn) for turn in list_of(row, "conversations")]
    for role, group in groupby(spoken, key=lambda turn: SPEAKERS.get(turn[0])):
        if role is Role.TOOL:
            for result in _results([value for _, value in group], turns.open_calls):
                turns.add(Role.TOOL, result)
        else:
            for speaker, value in group:
                _add(turns, speaker, value)
    return turns.conversation(tools)


def _add(turns: Turns, speaker: str, value: str) -> None:
    if speaker in CALLERS:
        turns.calls(_calls(value))
    elif SPEAKERS[speaker] is Role.ASSISTANT and OPEN in value:
        _tagged(value, turns)
    elif SPEAKERS[speaker] is not Role.SYSTEM or "<tools>" not in value:  # Hermes writes our own tools block there
        turns.add(SPEAKERS[speaker], value)


def _turn(turn: Any) -> tuple[str, str]:
    fields = mapping_of(turn, "conversations")
    speaker = fields.get("from", fields.get("role"))
    value = fields.get("value", fields.get("content"))
    if not isinstance(speaker, str) or speaker not in (*SPEAKERS, *CALLERS):
        raise Refused(Reason.ROLES, "conversations", f"nobody we know speaks as {speaker!r}")
    if not isinstance(value, str):
        raise Refused(Reason.LAYOUT, "conversations", f"expected text from {speaker}, got {type(value).__name__}")
    return speaker, value


def _calls(value: str) -> list[FunctionCall]:
    written = decoded(value, "conversations", Reason.CALL)
    return [call_of(call, "conversations") for call in (written if isinstance(written, list) else [written])]


def _results(values: list[str], calls: int) -> list[str]:
    """One text a call: turns of their own, tagged blocks, or one turn that holds a JSON list."""
    tagged = [result for value in values for result in RESPONSE.findall(value)]
    if tagged or len(values) == calls:
        return tagged or values
    listed = decoded(values[0], "conversations", Reason.NO_RESULT) if len(values) == 1 else values
    if not isinstance(listed, list) or len(listed) != calls:
        raise Refused(Reason.NO_RESULT, "conversations", f"{calls} calls are answered by {len(values)} turns")
    return [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in listed]


def _tagged(value: str, turns: Turns) -> None:
    found = parse_calls(value)
    broken = next((call.parse_error for call in found if call.parse_error), None)
    if broken:
        raise Refused(Reason.CALL, "conversations", broken)
    turns.add(Role.ASSISTANT, CALL_BLOCK.sub("", value).strip())
    turns.calls([FunctionCall(name=call.tool, arguments=call.arguments) for call in found])
