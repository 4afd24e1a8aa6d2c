"""Planned attempts on a real engine: what `play` asks for and `Dictated` cuts off is as long as planned, so that one
workload can be measured and simulated; and workloads from which an engine's costs can be told (`designed`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.workload import PlannedAttempt, planned
from rocstar.protocols import Engine, ForwardingEngine
from rocstar.types import Completion, Sampling, seed_for

WAVES = 3  # fillings of the cache, one after another, in the designed workload that only feeds


async def play(
    engine: Engine,
    attempts: Sequence[PlannedAttempt],
    *,
    vocab_size: int,
    clock: Callable[[], float],
    name: str = "0",
) -> list[float]:
    """Ask for all at once; when each had ended, seconds of `clock` since. Session ids are `NAME/NUMBER`, as in the
    simulator. The engine is asked for the room that an attempt has left, and is expected to be `Dictated` below.
    What it writes and what a tool replies are random tokens."""
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


class Dictated(ForwardingEngine):
    """Engine whose turns are as long as `lengths` says, while its callers know only the limit."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.lengths: dict[str, int] = {}
        """Request id -> tokens to sample; a request that is not in it ends as it ends."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        most = self.lengths.get(request_id, sampling.max_new_tokens)
        dictated = replace(sampling, max_new_tokens=min(most, sampling.max_new_tokens))
        return await super().generate(token_ids, dictated, request_id=request_id, session_id=session_id)


def designed(model: EngineModel, *, longest: int) -> list[list[PlannedAttempt]]:
    """Workloads for one engine that tell its costs apart: alone, in small and large batches, with short and long
    contexts up to a full cache, with much to feed, and with many short turns. `longest`: most tokens of one attempt.
    Most take a hundred steps or more, since a few steps say less than what else the machine does meanwhile. Nobody
    gives way; with much to feed most wait for room first."""
    short, long = max(2, longest // 16), max(4, longest // 2)
    some, rest = max(1, longest // 4), max(1, longest - long - short)

    def fitting(tokens: int) -> int:
        """Attempts of so many tokens that the cache holds at once, each with a page more."""
        return max(1, min(model.most_running, model.capacity_tokens // model.in_pages(tokens + model.page_tokens)))

    full, deep, few = fitting(short + some), fitting(long + rest), max(1, fitting(short + some) // 4)
    return [
        *(_alike(count, short, (some,)) for count in sorted({1, few, full})),
        *(_alike(count, long, (rest,)) for count in sorted({1, deep})),
        _alike(WAVES * fitting(long + 1), long, (1,)),
        _alike(few, short, (1,) * some),
        _alike(few, short, tuple(range(1, 1 + max(1, short // 2)))),
    ]


def _alike(count: int, prompt: int, sampled: Sequence[int]) -> list[PlannedAttempt]:
    """Attempts of different problems, with one token of reply between turns and no wait."""
    limit, lengths = sum(sampled) + len(sampled), [(tokens, 1) for tokens in sampled]
    return [planned(f"{place}", prompt, lengths, wait=0.0, limit=limit) for place in range(count)]
