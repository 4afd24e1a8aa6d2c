"""The turn loop: engine, environment, engine, environment, until the attempt ends.

A failed service never becomes a wrong answer: the trajectory ends as ENVIRONMENT_FAILED with a description of the
failure, and the resampler drops it. Nothing is tried again here: an engine that is a fleet (fleet.py) and the tools do
that themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from rocstar.errors import Unavailable
from rocstar.protocols import Engine, Environment, Reply
from rocstar.types import Problem, Sampling, Stop, Trajectory, Turn, seed_for

Note = Callable[[str, str | None], None]
"""(who, what it waits for), called at each change, with None at the end; `rocstar.support.watch.Watch.note` is one."""


def note_nothing(who: str, what: str | None) -> None:
    """A Note that records nothing."""


async def run_episode(
    engine: Engine,
    environment: Environment,
    problem: Problem,
    *,
    index: int,
    sampling: Sampling,
    session_id: str,
    note: Note = note_nothing,
    begun: tuple[int, ...] | None = None,
) -> Trajectory:
    """One attempt, from opening to end. `sampling.max_new_tokens` is replaced by the environment's remaining budget;
    turn t samples with a seed made of (sampling.seed, t). Cancelling it cancels the engine request or tool call.
    However it ends, the environment and the engine's session are closed.

    begun: tokens of an attempt to continue, its last reply included; they are the trajectory's prompt.
    """
    started = time.monotonic()
    prompt_ids = environment.opening() if begun is None else begun
    ids = list(prompt_ids)
    turns: list[Turn] = []
    stop, fault = None, None
    try:
        while stop is None:
            note(session_id, "an engine")
            sent, number = time.monotonic(), len(turns)
            request = replace(sampling, max_new_tokens=environment.budget(), seed=seed_for(sampling.seed, number))
            name = f"{session_id}/turn{number}"
            completion = await engine.generate(ids, request, request_id=name, session_id=session_id)
            received = time.monotonic()
            turns.append(Turn(completion=completion, engine_seconds=received - sent))
            note(session_id, "a tool")
            reply = await environment.reply(completion)
            turns[-1] = answered(turns[-1], reply, time.monotonic() - received)
            ids += [*completion.token_ids, *reply.reply_ids]
            stop = reply.stop
    except Unavailable as error:
        stop, fault = Stop.ENVIRONMENT_FAILED, str(error)
    finally:
        unclosed = await asyncio.shield(_close(engine, environment, session_id, note))
    if unclosed:
        stop, fault = Stop.ENVIRONMENT_FAILED, fault or unclosed
    return Trajectory(
        problem_id=problem.id,
        index=index,
        prompt_ids=prompt_ids,
        turns=tuple(turns),
        stop=stop,
        fault=fault,
        seconds=time.monotonic() - started,
        tool_seconds=sum(turn.tool_seconds or 0.0 for turn in turns),
    )


def answered(turn: Turn, reply: Reply, tool_seconds: float) -> Turn:
    """A turn with the reply to its completion."""
    return replace(turn, calls=reply.calls, results=reply.results, reply_ids=reply.reply_ids, tool_seconds=tool_seconds)


async def _close(engine: Engine, environment: Environment, session_id: str, note: Note) -> str | None:
    """Why the environment could not be closed; None where it could."""
    note(session_id, "its end")
    try:
        await environment.close()
        return None
    except Unavailable as error:
        return str(error)
    finally:
        await engine.close_session(session_id)
        note(session_id, None)
