"""Planned attempts on a real engine: each turn is as long as planned, each tool takes as long as planned.

So the same workload can be measured and simulated. What the engine writes and what a tool replies are random tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocstar.forecast.workload import PlannedAttempt
from rocstar.protocols import Engine
from rocstar.types import Completion, EngineLoad, Sampling, Weights, seed_for


async def play(
    engine: Engine,
    attempts: Sequence[PlannedAttempt],
    *,
    vocab_size: int,
    clock: Callable[[], float],
    name: str = "0",
) -> list[float]:
    """Ask for all at once; when each had ended, seconds of `clock` since. Session ids are `NAME/NUMBER`, as in the
    simulator. The engine is asked for the room that an attempt has left, and is expected to be `Dictated` below."""
    start = clock()

    async def played(number: int, attempt: PlannedAttempt) -> float:
        await _attempt(engine, attempt, f"{name}/{number}", vocab_size)
        return clock() - start

    return await asyncio.gather(*(played(number, attempt) for number, attempt in enumerate(attempts)))


async def _attempt(engine: Engine, attempt: PlannedAttempt, session: str, vocab_size: int) -> None:
    """All siblings have one prompt."""
    ids = _random_ids(f"{attempt.group}/prompt", attempt.prompt_tokens, vocab_size)
    for number, turn in enumerate(attempt.turns):
        left = attempt.limit + attempt.prompt_tokens - len(ids)
        sampling = Sampling(max_new_tokens=left, seed=seed_for("played", session, number))
        request = request_name(session, number)
        completion = await engine.generate(ids, sampling, request_id=request, session_id=session)
        await asyncio.sleep(turn.tool_seconds)
        ids = [*ids, *completion.token_ids, *_random_ids(request, turn.reply_tokens, vocab_size)]
    await engine.close_session(session)


def request_name(session: str, turn: int) -> str:
    return f"{session}/{turn}"


def _random_ids(name: str, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed_for("ids", name))
    return [rng.randrange(vocab_size) for _ in range(count)]


def dictated_lengths(attempts: Sequence[PlannedAttempt], name: str = "0") -> dict[str, int]:
    """Request id -> tokens to sample, for `play` with the same name."""
    return {
        request_name(f"{name}/{number}", turn): lengths.sampled_tokens
        for number, attempt in enumerate(attempts)
        for turn, lengths in enumerate(attempt.turns)
    }


class Dictated:
    """Engine whose turns are as long as `lengths` says, whoever asks knowing only the limit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.lengths: dict[str, int] = {}
        """Request id -> tokens to sample; a request that is not in it ends as it ends."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        most = self.lengths.get(request_id, sampling.max_new_tokens)
        dictated = replace(sampling, max_new_tokens=min(most, sampling.max_new_tokens))
        return await self._engine.generate(token_ids, dictated, request_id=request_id, session_id=session_id)

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def load_weights(self, weights: Weights) -> None:
        await self._engine.load_weights(weights)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def close_session(self, session_id: str) -> None:
        await self._engine.close_session(session_id)
