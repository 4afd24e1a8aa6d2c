"""Each fault of the schedule strikes when it should, and only then."""

from __future__ import annotations

import asyncio
import math

import pytest

from rocstar.errors import EngineUnavailable
from rocstar.types import Completion, Sampling, Weights
from tests.contracts.engines import Letters
from tests.faulty import NO_TOKEN, Fault, FaultKind, FaultyEngine
from tests.scripted import ScriptedEngine


def engine(*faults: Fault) -> FaultyEngine:
    return FaultyEngine(ScriptedEngine(Letters(), ["HELLO"]), faults)


async def ask(engine: FaultyEngine, session: str) -> Completion:
    return await engine.generate([1, 2], Sampling(max_new_tokens=9), request_id=session, session_id=session)


async def settled(task: asyncio.Task[Completion]) -> bool:
    """Whether it has ended once everything else has done what it can."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


@pytest.mark.parametrize("kind", FaultKind)
async def test_requests_before_and_after_those_that_a_fault_strikes_are_as_ever(kind: FaultKind) -> None:
    faulty = engine(Fault(kind=kind, first=1, count=1, seconds=60.0 if kind is FaultKind.DELAY else 0.0))
    assert await ask(faulty, "a") == await ask(engine(), "a")
    struck = asyncio.create_task(ask(faulty, "b"))
    assert await settled(struck) != (kind in (FaultKind.HANG, FaultKind.LOST, FaultKind.DELAY))
    assert await ask(faulty, "c") == await ask(engine(), "c")
    struck.cancel()
    await asyncio.gather(struck, return_exceptions=True)


async def test_a_dead_engine_refuses_everybody_and_those_in_flight_hear_of_it() -> None:
    faulty = engine(Fault(kind=FaultKind.LOST, first=0), Fault(kind=FaultKind.DEATH, first=1, count=None))
    in_flight = asyncio.create_task(ask(faulty, "a"))
    assert not await settled(in_flight)
    for session in "bc":
        with pytest.raises(EngineUnavailable, match="dead"):
            await ask(faulty, session)
    with pytest.raises(EngineUnavailable, match="died"):
        await in_flight
    with pytest.raises(EngineUnavailable, match="dead"):
        await faulty.load_weights(Weights(version=1))


async def test_a_late_answer_is_the_right_one_and_a_spoilt_one_is_spoilt_in_one_thing_only() -> None:
    whole = await ask(engine(), "a")
    assert await ask(engine(Fault(kind=FaultKind.DELAY, seconds=0.01)), "a") == whole
    stamped = await ask(engine(Fault(kind=FaultKind.WRONG_VERSION)), "a")
    assert [span.version for span in stamped.version_spans] == [1] and stamped.token_ids == whole.token_ids
    nan = await ask(engine(Fault(kind=FaultKind.NAN)), "a")
    assert all(map(math.isnan, nan.logprobs)) and nan.token_ids == whole.token_ids
    garbage = await ask(engine(Fault(kind=FaultKind.GARBAGE)), "a")
    assert set(garbage.token_ids) == {NO_TOKEN} and garbage.logprobs == whole.logprobs
