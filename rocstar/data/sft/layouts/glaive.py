"""Glaive function calling v2 as published: `system` and `chat`, two texts with speakers in capitals.

SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{"name": "get_news", "description": "...", "parameters": {...}}

USER: Tell me the news.
ASSISTANT: <functioncall> {"name": "get_news", "arguments": '{"country": "us"}'} <|endoftext|>
FUNCTION RESPONSE: {"headlines": [...]}
ASSISTANT: Here they are. <|endoftext|>"""

from __future__ import annotations

import json
import re
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role, call_of, decoded
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, text_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.data.sft.schema import tool_spec
from rocstar.protocols import ToolSpec

SPEAKER = re.compile(r"(?:^|\n)[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
CALL = "<functioncall>"
END = "<|endoftext|>"
QUOTED = re.compile(r"""("arguments"\s*:\s*)'(.*)'(\s*\}\s*)$""", re.DOTALL)
"""Arguments stand as JSON text in single quotes, which no JSON reader takes."""


def glaive(_: Surroundings) -> Layout:
    return each(_conversation)


def _conversation(row: Row) -> Conversation:
    turns = Turns()
    parts = SPEAKER.split(text_of(row, "chat"))
    if parts[0].strip():
        raise Refused(Reason.ROLES, "chat", f"starts with {parts[0].strip()[:40]!r} and no speaker")
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        words = said.replace(END, "").strip()
        if speaker == "ASSISTANT" and CALL in words:
            before, _, call = words.partition(CALL)
            if before.strip():
                turns.add(Role.ASSISTANT, before.strip())
            turns.calls([_call(call.strip())])
        else:
            turns.add({"USER": Role.USER, "ASSISTANT": Role.ASSISTANT}.get(speaker, Role.TOOL), words)
    return turns.conversation(_tools(str(row.get("system") or "")))


def _call(text: str) -> FunctionCall:
    quoted = QUOTED.search(text)
    if quoted:
        inner = quoted[2].replace("\\'", "'")
        text = text[: quoted.start()] + quoted[1] + json.dumps(inner) + quoted[3]
    return call_of(decoded(text, "chat", Reason.CALL), "chat")


def _tools(system: str) -> list[ToolSpec]:
    """The JSON objects that follow one another in the system text; what it says around them is left out, because the
    tools block of the template says the same."""
    tools: list[ToolSpec] = []
    place = system.find("{")
    while place >= 0:
        tool, end = _object(system, place)
        tools.append(tool_spec(tool, "system"))
        place = system.find("{", end)
    return tools


def _object(text: str, place: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise Refused(Reason.TOOLS, "system", f"is not JSON: {error}") from None
