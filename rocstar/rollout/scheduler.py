"""The interface of a scheduler, which decides which engine continues which trajectory, and when.

Pure: facts and the time come in, assignments go out; no clock, no I/O, no await. The fleet carries the assignments out
over real engines, the simulator over modelled ones. One turn of one trajectory, in the order of the calls:

    ask        it has token ids to continue, and waits
    assign     ... this engine shall do it now
    answered   the engine has ended the turn; what it caches for the trajectory stays there while a tool runs
    close      the trajectory has ended; its cache is free
    lose       an engine has died: the turns that it worked on wait again, what it cached is lost
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rocstar.types import EngineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One turn of a trajectory that waits for an engine."""

    request_id: str
    session_id: str
    """Names the trajectory, whose turns extend one another."""
    group: str
    """Names the group: siblings have the same group and the same prompt."""
    prompt_tokens: int
    """Length of the trajectory's prompt."""
    tokens: int
    """Tokens to continue: the prompt and everything after it so far."""
    limit: int
    """Most tokens that may follow in the rest of the trajectory."""


class Scheduler(Protocol):
    """Promise: every ask is assigned once, unless its engine is lost, and none waits without end while an engine exists
    that could hold it."""

    def ask(self, ask: Ask, now: float) -> None: ...

    def assign(self, engines: Mapping[str, EngineLoad], now: float) -> dict[str, str]:
        """The requests that may start now, in this order, each with its engine. engines: those that are up, by name.
        `now`: seconds of a clock that never goes back.

        An engine that is missing is away for now, and its cache is kept. Cheap if nothing has changed, so it may be
        called after every other call."""
        ...

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        """A turn ended after `tokens` new tokens."""
        ...

    def close(self, session_id: str, now: float) -> None:
        """A trajectory has ended, in whatever state its ask is. Unknown ids are ignored."""
        ...

    def lose(self, engine: str, now: float) -> None: ...
