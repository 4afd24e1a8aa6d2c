"""An engine without a model: what it writes follows from the tokens to continue and the seed alone, one token each turn
of the event loop. For tests of everything that carries turns to engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights, spans_of

IDS = 50  # it writes ids below this
PROMPT = (3, 4, 5)


async def until(condition: Callable[[], bool]) -> None:
    """A test that never gets there ends at the suite's own limit."""
    while not condition():  # noqa: ASYNC110 - an engine's load tells nobody when it changes
        await asyncio.sleep(0.001)


async def ask(
    engine: Any, session: str = "s", turn: int = 0, ids: Sequence[int] = PROMPT, tokens: int = 5, **sampling: Any
) -> Completion:
    """A turn of a session at any engine, which the number of the turn seeds."""
    asked = Sampling(max_new_tokens=tokens, **{"seed": turn, **sampling})
    made: Completion = await engine.generate(ids, asked, request_id=f"{session}/{turn}", session_id=session)
    return made


def written(token_ids: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
    """The tokens that any PlainEngine writes."""
    draw = random.Random(repr((tuple(token_ids), sampling.seed)))
    ids: list[int] = []
    while len(ids) < sampling.max_new_tokens and not (ids and ids[-1] in sampling.stop_token_ids):
        ids.append(draw.randrange(IDS))
    return tuple(ids)


class PlainEngine:
    """`pause`: seconds between two tokens."""

    def __init__(self, *, version: int = 0, pause: float = 0.0, capacity: int = 10_000) -> None:
        self.version, self.pause, self.capacity = version, pause, capacity
        self.folder: str | None = None
        self.running: dict[str, str] = {}
        """By request: its session."""
        self.sessions: set[str] = set()
        self.produced = 0
        self.awake = asyncio.Event()
        self.awake.set()
        self.seen: list[str] = []
        """Request ids, in the order they came."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        self.seen.append(request_id)
        self.sessions.add(session_id)
        self.running[request_id] = session_id
        ids: list[int] = []
        versions: list[int] = []
        try:
            for token in written(token_ids, sampling):
                await asyncio.sleep(self.pause)
                await self.awake.wait()
                if session_id not in self.sessions:
                    break
                ids.append(token)
                versions.append(self.version)
                self.produced += 1
        finally:
            del self.running[request_id]
        finish = Finish.STOP if ids and ids[-1] in sampling.stop_token_ids else Finish.LENGTH
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-1.0 - token / 100 for token in ids),
            finish=finish if session_id in self.sessions else Finish.ABORTED,
            version_spans=spans_of(versions),
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            capacity_tokens=self.capacity,
            used_tokens=0,
            running=len(self.running),
            waiting=0,
            policy_version=self.version,
            produced_tokens=self.produced,
        )

    async def load_weights(self, weights: Weights) -> None:
        await asyncio.sleep(0)
        self.version, self.folder = weights.version, weights.folder
        self.awake.set()

    async def sleep(self) -> None:
        self.awake.clear()

    async def close_session(self, session_id: str) -> None:
        self.sessions.discard(session_id)
