"""What a fleet keeps of each trajectory, turn and engine. Not here: what it does with them (fleet.py)."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rocstar.protocols import Engine
from rocstar.rollout.scheduler import Ask
from rocstar.types import Completion, Sampling


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """One trajectory, between its first turn and `close_session`."""

    group: str
    prompt_tokens: int
    turns: deque[Turn] = field(default_factory=deque)
    """Under way, in order; only the first is asked of the scheduler."""
    engines: set[str] = field(default_factory=set)
    """That may cache some of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    ask: Ask
    token_ids: tuple[int, ...]
    sampling: Sampling
    session: Session
    answer: asyncio.Future[Completion]
    tries: int = 0
    """How often it was given to an engine."""
    member: Member | None = None
    """Whom it runs on; None while it waits."""
    task: asyncio.Task[None] | None = None
    previous: str | None = None
    """The engine it was taken from."""
    ending: bool = False
    """Somebody asked for its end."""

    @property
    def request_id(self) -> str:
        """As engines know it: a name of its own for each try, so that the end of one is not taken for another's."""
        return self.ask.request_id if self.tries <= 1 else f"{self.ask.request_id}/try{self.tries}"


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """One engine, as the fleet knows it."""

    name: str
    engine: Engine
    version: int
    """Of the weights that it was seen to have."""
    up: bool = True
    reason: str = ""
    """Why it was taken out, or why the last probe failed."""
    turns: set[Turn] = field(default_factory=set)
    failures: int = 0
    """In a row."""
    answered: int = 0
    """Turns that it has ended."""
    seen: tuple[int, ...] = ()
    """What changes when it works, at the last look."""
    looks: int = 0
    """In a row at which nothing had changed."""
    probes: int = 0
    """Since it last took new weights; the more, the rarer they become."""
    tries: int = 0
    """Probes since it was taken out."""
    lost_at: float = 0.0
    """When it was last taken out; seconds of `time.monotonic`."""

    def progress(self) -> tuple[int, ...]:
        load = self.engine.load()
        return self.answered, load.used_tokens, load.produced_tokens, load.recomputed_tokens
