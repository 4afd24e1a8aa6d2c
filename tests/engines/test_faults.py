"""Each fault of the schedule strikes when it should, and only then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from rocstar.errors import EngineUnavailable
from rocstar.types import Completion, Sampling, Weights
from tests.faulty import NO_TOKEN, Fault, FaultKind, FaultyEngine
from tests.rollout.examples import Endless
from tests.scripted import ScriptedEngine

KINDS = list(FaultKind)


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def engine(*faults: Fault) -> FaultyEngine:
    return FaultyEngine(ScriptedEngine(Letters(), ["HELLO"]), faults)


async def ask(engine: FaultyEngine, session: str) -> Completion:
    return await engine.generate([1, 2], Sampling(max_new_tokens=9), request_id=session, session_id=session)


async def settled(task: asyncio.Task[Completion]) -> bool:
    """Whether it has ended once everything else has done what it can."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_before_the_first_that_a_fault_strikes_is_as_ever(kind: FaultKind) -> None:
    expected = await ask(engine(), "a")
    assert await ask(engine(Fault(kind=kind, first=1)), "a") == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_after_the_last_that_a_fault_strikes_is_as_ever(kind: FaultKind) -> None:
    faulty = engine(Fault(kind=kind, first=0, count=1))
    struck = asyncio.create_task(ask(faulty, "a"))
    await settled(struck)
    expected = await ask(engine(), "b")
    assert await ask(faulty, "b") == expected
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


async def test_a_hung_engine_answers_nobody_until_they_give_up() -> None:
    faulty = engine(Fault(kind=FaultKind.DELAY, first=0, seconds=0.01), Fault(kind=FaultKind.HANG, first=1, count=None))
    waiting = [asyncio.create_task(ask(faulty, session)) for session in "ab"]
    await asyncio.sleep(0.05)
    weights = asyncio.create_task(faulty.load_weights(Weights(version=1)))
    assert not any([await settled(task) for task in (*waiting, weights)])  # type: ignore[arg-type]
    for task in (*waiting, weights):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_lost_request_is_never_answered_and_the_others_are() -> None:
    faulty = engine(Fault(kind=FaultKind.LOST, first=0))
    lost = asyncio.create_task(ask(faulty, "a"))
    assert not await settled(lost)
    assert len((await ask(faulty, "b")).token_ids) == 5
    assert not await settled(lost)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)


async def test_whoever_gives_up_gives_the_request_of_the_inner_engine_up_too() -> None:
    inner = Endless()
    asking = asyncio.create_task(ask(FaultyEngine(inner, []), "a"))
    await inner.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert inner.cancelled


async def test_a_spoilt_answer_is_spoilt_in_one_thing_only() -> None:
    whole = await ask(engine(), "a")
    stamped = await ask(engine(Fault(kind=FaultKind.WRONG_VERSION)), "a")
    assert [span.version for span in stamped.version_spans] == [1] and stamped.token_ids == whole.token_ids
    nan = await ask(engine(Fault(kind=FaultKind.NAN)), "a")
    assert all(map(math.isnan, nan.logprobs)) and nan.token_ids == whole.token_ids
    garbage = await ask(engine(Fault(kind=FaultKind.GARBAGE)), "a")
    assert set(garbage.token_ids) == {NO_TOKEN} and garbage.logprobs == whole.logprobs


async def test_a_late_answer_is_the_right_one() -> None:
    assert await ask(engine(Fault(kind=FaultKind.DELAY, seconds=0.01)), "a") == await ask(engine(), "a")
