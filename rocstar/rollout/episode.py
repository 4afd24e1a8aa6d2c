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
from rocstar.protocols import Engine, Environment, Reply, ResumableEnvironment
from rocstar.types import Finish, Problem, Sampling, Stop, Trajectory, Turn, joined, seed_for

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
    before: Trajectory | None = None,
    most: int | None = None,
) -> Trajectory:
    """One attempt, from opening to end. `sampling.max_new_tokens` is replaced by the environment's remaining budget;
    turn t samples with a seed made of (sampling.seed, t). Cancelling it cancels the engine request or tool call.
    However it ends, the environment and the engine's session are closed.

    begun: tokens of an attempt to continue, its last reply included; they are the trajectory's prompt. before: the
    attempt to go on with, as it was set aside. most: tokens that it may sample in all before it is set aside.
    """
    started = time.monotonic()
    prompt_ids = environment.opening() if begun is None else begun
    ids = list(before.token_ids if before else prompt_ids)
    turns = list(before.turns if before else ())
    part = turns.pop().completion if turns and not turns[-1].reply_ids else None  # of an unfinished turn
    stop, fault = None, None
    try:
        if before:
            assert isinstance(environment, ResumableEnvironment)
            await environment.again(turns)
        while stop is None:
            room, sampled = environment.budget(), sum(len(turn.completion.token_ids) for turn in turns)
            number, tokens = len(turns), room if most is None else min(room, most - sampled)
            if before and room <= (len(part.token_ids) if part else 0):  # the limit is lower than when it was set aside
                turns += [Turn(completion=part)] if part else []
                stop = Stop.MAX_TOKENS
                break
            if not tokens:
                stop = Stop.SET_ASIDE
                break
            note(session_id, "an engine")
            sent, name = time.monotonic(), f"{session_id}/turn{number}"
            seed = seed_for(sampling.seed, number)
            if part:
                done = len(part.token_ids)
                seed, name, tokens = seed_for(sampling.seed, number, done), f"{name}+{done}", tokens - done
            request = replace(sampling, max_new_tokens=tokens, seed=seed)
            completion = await engine.generate(ids, request, request_id=name, session_id=session_id)
            if part:
                completion, ids, part = joined(part, completion), ids[: len(ids) - len(part.token_ids)], None
            received = time.monotonic()
            turns.append(Turn(completion=completion, engine_seconds=received - sent))
            written = len(completion.token_ids)
            if completion.finish is Finish.LENGTH and most == sampled + written and written < room:
                stop = Stop.SET_ASIDE
                break
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
        seconds=time.monotonic() - started + (before.seconds if before else 0.0),
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
