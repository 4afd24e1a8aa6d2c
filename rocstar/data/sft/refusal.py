"""Why a row is left out. A refused row is data about the input, told by file, line, field and reason; it stops
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rocstar.errors import DataError


class Reason(StrEnum):
    """One per kind of fault; the datasheet counts them."""

    NOT_JSON = "not_json"  # the line cannot be read at all
    LAYOUT = "layout"  # a field is missing or of another kind than the layout says
    TOOLS = "tools"  # the list of tools cannot be read, or names one tool twice
    CALL = "call"  # a call cannot be read
    ROLES = "roles"  # messages do not alternate as a conversation does
    EMPTY = "empty"  # a message says nothing
    MARKER = "marker"  # a text holds a marker of the template or a special token, which would forge a turn
    CHARACTERS = "characters"  # text that is not Unicode, a number that JSON cannot write
    UNKNOWN_TOOL = "unknown_tool"
    MISSING_ARGUMENT = "missing_argument"
    UNKNOWN_ARGUMENT = "unknown_argument"
    ARGUMENT_TYPE = "argument_type"
    ARGUMENT_VALUE = "argument_value"  # outside the schema's enum
    PLACEHOLDER = "placeholder"  # an argument stands for the result of another call, which nobody knows
    NO_ANSWER = "no_answer"  # the source gives no answer to learn
    NO_RESULT = "no_result"  # calls that need results which the source does not give
    CODE = "code"  # not exactly one Python program, or one that does not parse
    REASONING = "reasoning"  # a reasoning trace, which non-reasoning SFT leaves out on purpose
    ROUND_TRIP = "round_trip"  # the rendered calls do not read back as the same calls
    LOSS_SPAN = "loss_span"  # the learned tokens do not read back as what the assistant writes
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    REWRITE = "rewrite"  # the endpoint refused the row, or its answer was empty or cut


class Refused(DataError):
    """One row is refused. Where a single bad row must end everything (training), it is told as a DataError."""

    def __init__(self, reason: Reason, field: str, detail: str) -> None:
        super().__init__(f"field {field}: {detail}")
        self.reason = reason
        self.field = field
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A line of the refused-rows file."""

    source: str
    """Name of the source in the recipe."""
    file: str
    """As the recipe writes it."""
    line: int
    """From 1; in files that are one JSON list, the number of the item; in parquet, of the row."""
    reason: Reason
    field: str
    detail: str
    """What was found, one sentence."""
    excerpt: str
    """The start of the row as it was read."""

    def as_row(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
