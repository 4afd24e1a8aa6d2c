"""Instruction and chat sets: OpenAI messages (Tulu 3 and most others), prompt and response pairs, Nemotron.

Rows without a response are kept open: they end with the user, and only the rewriting step can answer them."""

from __future__ import annotations

from dataclasses import replace

from rocstar.data.sft.format import Conversation, Message, Role, conversation_of, message_of
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, each, text_of
from rocstar.data.sft.refusal import Reason, Refused

PROMPTS = ("prompt", "instruction", "question", "problem", "query")
RESPONSES = ("response", "output", "completion", "answer", "solution", "chosen")
THINKING = "detailed thinking"
"""Nemotron's system texts are `detailed thinking on` and `detailed thinking off`: a switch, not an instruction."""


def messages(_: Surroundings) -> Layout:
    """`messages` and, where there are tools, `tools`: OpenAI's form and our own."""
    return each(_messages)


def pairs(_: Surroundings) -> Layout:
    """One column with the prompt and one with the response, under their usual names; Alpaca's `input` follows the
    instruction after an empty line."""
    return each(_pair)


def nemotron(_: Surroundings) -> Layout:
    """Llama-Nemotron post-training rows: `input` (messages or text), `output`, `system_prompt`, `reasoning`."""
    return each(_nemotron)


def _messages(row: Row) -> Conversation:
    read = conversation_of(row)
    return replace(read, tools=read.tools or (), source="")


def _pair(row: Row) -> Conversation:
    prompt = text_of(row, next((name for name in PROMPTS if name in row), PROMPTS[0]))
    if row.get("instruction") == prompt and row.get("input"):
        prompt = f"{prompt}\n\n{text_of(row, 'input')}"
    answered = next((name for name in RESPONSES if row.get(name) is not None), None)
    turns = [Message(role=Role.USER, content=prompt)]
    if answered:
        turns.append(Message(role=Role.ASSISTANT, content=text_of(row, answered)))
    return Conversation(messages=tuple(turns), tools=())


def _nemotron(row: Row) -> Conversation:
    output = text_of(row, "output")
    if row.get("reasoning") == "on" or "<think>" in output:
        raise Refused(Reason.REASONING, "output", "the response is a reasoning trace")
    asked = row.get("input")
    if isinstance(asked, str):
        turns = [Message(role=Role.USER, content=text_of(row, "input"))]
    elif isinstance(asked, list):
        turns = [message_of(message) for message in asked]
    else:
        raise Refused(Reason.LAYOUT, "input", f"expected messages or a text, got {type(asked).__name__}")
    system = str(row.get("system_prompt") or "")
    if system and not system.startswith(THINKING):
        turns = [Message(role=Role.SYSTEM, content=system), *turns]
    return Conversation(messages=(*turns, Message(role=Role.ASSISTANT, content=output)), tools=())
