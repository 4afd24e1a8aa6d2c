"""What layouts share: what they are given, how fields are read, and how turns are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Message, Role, decoded
from rocstar.data.sft.reading import read_rows
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.errors import DataError
from rocstar.protocols import ToolSpec

Row = Mapping[str, Any]
Layout = Callable[[Row], Iterable[Conversation | Refused]]
"""One row of a file in, the conversations it holds out. Raises Refused when the whole row is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a layout may need besides the row."""

    files: tuple[Path, ...]
    """The source's own files, for layouts that must look through all rows first."""
    tool_files: tuple[Path, ...] = ()
    """Where tools are described apart from the rows."""
    answer_files: tuple[Path, ...] = ()
    """Where answers stand apart from the questions."""
    other_tools: int = 0
    """Tools offered besides those that are called, where a source describes them apart; number a conversation."""
    seed: int = 0
    """For the choice of other tools."""
    code_tool: ToolSpec
    """The tool that runs programs."""


class Turns:
    """Messages in the making: calls join the assistant's words before them, each result is a message of its own."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def add(self, role: Role, content: str) -> None:
        self._messages.append(Message(role=role, content=content))

    def calls(self, calls: Sequence[FunctionCall]) -> None:
        content, before = "", ()  # type: str, tuple[FunctionCall, ...]
        if self._messages and self._messages[-1].role is Role.ASSISTANT:
            last = self._messages.pop()
            content, before = last.content, last.calls
        self._messages.append(Message(role=Role.ASSISTANT, content=content, calls=(*before, *calls)))

    @property
    def open_calls(self) -> int:
        """Calls of the last message, which still want results."""
        return len(self._messages[-1].calls) if self._messages else 0

    def conversation(self, tools: Sequence[ToolSpec]) -> Conversation:
        return Conversation(messages=tuple(self._messages), tools=tuple(tools))


def each(read: Callable[[Row], Conversation]) -> Layout:
    """A layout whose rows hold one conversation."""

    def layout(row: Row) -> Iterator[Conversation | Refused]:
        yield read(row)

    return layout


def companion_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Rows of files that stand beside the source's own; here a bad row ends everything. Raises DataError."""
    for file in files:
        for number, row in read_rows(file):
            if not isinstance(row, dict):
                raise DataError(f"{file}:{number} is not a JSON object; mend the line or take the file out")
            yield row


def text_of(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(Reason.LAYOUT, name, f"expected a text, got {_shown(value)}")
    return value


def list_of(row: Row, name: str) -> list[Any]:
    """A list, or JSON text that holds one."""
    value = row.get(name)
    if isinstance(value, str):
        value = decoded(value, name, Reason.LAYOUT)
    if not isinstance(value, list):
        raise Refused(Reason.LAYOUT, name, f"expected a list, got {_shown(value)}")
    return value


def mapping_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused(Reason.LAYOUT, field, f"expected an object, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
