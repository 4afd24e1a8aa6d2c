"""What the model asked a tool for, and what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What a *program* did. There is no "service down" here: that is SandboxUnavailable."""

    OK = "ok"
    CODE_ERROR = "code_error"  # uncaught exception, syntax error, non-zero exit, fatal signal
    TIMEOUT = "timeout"  # wall or CPU limit
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"  # flooded its output channel
    BAD_CALL = "bad_call"  # the call did not parse, named no known tool, or had wrong arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    id: str
    """Unique inside a trajectory, in order of appearance."""
    tool: str
    """Name the model used; empty when the call did not parse."""
    arguments: Mapping[str, Any]
    """Decoded arguments; empty when the call did not parse."""
    raw: str
    """Exact text between the call tags."""
    parse_error: str | None = None
    """Why it did not parse; None for a well-formed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    call_id: str
    """`ToolCall.id` this answers."""
    status: Status
    """What the program did."""
    stdout: str = ""
    """Standard output, possibly cut; invalid UTF-8 replaced."""
    stderr: str = ""
    """Standard error and traceback, or the reason of a bad call."""
    value: str | None = None
    """The last expression's value as IPython shows it; None when there is none."""
    run_seconds: float = 0.0
    """Wall time of the program, seconds; excludes queueing."""
    queue_seconds: float = 0.0
    """Wall time spent waiting for a slot, seconds."""
    truncated_bytes: int = 0
    """Bytes of output that were dropped."""
    isolation: str = ""
    """Isolation level in force (`L3`, `L2`, `L1`); empty when nothing was run."""

    @property
    def is_error(self) -> bool:
        """The one definition of a failed call; RoC counts this and never text (release: substring "error")."""
        return self.status is not Status.OK
