"""Magicoder's OSS-Instruct (`problem`, `solution`, `lang`) and Evol-Instruct (`instruction`, `response`): the one
Python program of a solution becomes a call of the code tool. It is not run: the row ends with the call. Words before
the program stay, words after it go, because they speak of a result the assistant has not seen."""

from __future__ import annotations

import ast
import re

from rocstar.data.sft.format import Conversation, FunctionCall, Role
from rocstar.data.sft.layouts.base import Layout, Row, Surroundings, Turns, each, text_of
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.protocols import ToolSpec

FENCED = re.compile(r"^```[ \t]*([\w+#.-]*)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PYTHON = ("python", "python3", "py")


def magicoder(around: Surroundings) -> Layout:
    return each(lambda row: _conversation(row, around.code_tool))


def _conversation(row: Row, tool: ToolSpec) -> Conversation:
    asked, answered = ("problem", "solution") if "problem" in row else ("instruction", "response")
    response = text_of(row, answered)
    blocks = list(FENCED.finditer(response))
    if len(blocks) != 1:
        raise Refused(Reason.CODE, answered, f"holds {len(blocks)} blocks of code; one is wanted")
    language = blocks[0][1].lower() or str(row.get("lang", "")).lower()
    if language not in PYTHON:
        raise Refused(Reason.CODE, answered, f"is written in {language or 'no named language'}")
    code = blocks[0][2].rstrip()
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(Reason.CODE, answered, f"is not Python: {error}") from None
    turns = Turns()
    turns.add(Role.USER, text_of(row, asked))
    before = response[: blocks[0].start()].strip()
    if before:
        turns.add(Role.ASSISTANT, before)
    turns.calls([FunctionCall(name=tool.name, arguments={next(iter(tool.parameters["properties"])): code})])
    return turns.conversation([tool])
