"""A file of SFT rows as conversations to train on. Here one bad row ends everything: what is trained on is said to the
last row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rocstar.data.sft.check import check_roles
from rocstar.data.sft.format import Conversation, conversation_of
from rocstar.data.sft.reading import read_rows
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.errors import DataError


def load_conversations(path: Path, tool_name: str) -> list[Conversation]:
    """All conversations of a file. `tool_name` stands in where a call names no tool. Raises DataError naming file, line
    and field."""
    rows = [_conversation(row, f"{path}, line {number}", tool_name) for number, row in read_rows(path)]
    if not rows:
        raise DataError(f"{path} holds no conversation")
    return rows


def _conversation(row: Any, place: str, tool_name: str) -> Conversation:
    try:
        if isinstance(row, Refused):
            raise row
        conversation = conversation_of(row, tool_name=tool_name)
        check_roles(conversation.messages)
        return conversation
    except Refused as refused:
        told = refused.detail if refused.reason is Reason.NOT_JSON else str(refused)
        raise DataError(f"{place}: {told}") from None
