"""Attempts made ahead of the updates: how old they may be, for any speeds; and what ends with a stage."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.run.ahead import StepsAhead

Speeds = list[int]


@dataclass
class World:
    """Attempts and a learner that take as many turns of the event loop as they are told. An attempt's tokens are the
    weights that were published when each was written: the number of steps learnt from."""

    rolling: Speeds
    learning: Speeds
    published: int = 0
    begun: list[int] = field(default_factory=list)
    learnt: list[tuple[int, list[int]]] = field(default_factory=list)

    async def roll(self, step: int) -> Any:
        self.begun.append(step)
        tokens = []
        for _ in range(self.rolling[step]):
            tokens.append(self.published)
            await asyncio.sleep(0)
        return [*tokens, self.published]

    async def train(self, ahead: int) -> None:
        async with StepsAhead(self.roll, end=len(self.rolling), ahead=ahead) as attempts:
            for step, turns in enumerate(self.learning):
                tokens: Any = await attempts.take(step)
                for _ in range(turns):
                    await asyncio.sleep(0)
                self.learnt.append((step, tokens))
                self.published += 1


speeds = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12)


@given(speeds=speeds, ahead=st.integers(0, 4))
def test_no_token_is_older_than_the_bound_and_every_step_is_learnt_from_once_in_order(
    speeds: list[tuple[int, int]], ahead: int
) -> None:
    world = World([rolling for rolling, _ in speeds], [learning for _, learning in speeds])
    asyncio.run(world.train(ahead))
    assert world.begun == [step for step, _ in world.learnt] == list(range(len(speeds)))
    for step, tokens in world.learnt:
        assert len(tokens) == world.rolling[step] + 1
        assert all(0 <= step - version <= ahead for version in tokens)


def test_a_slow_learner_finds_its_next_steps_made_and_the_oldest_tokens_are_exactly_as_old_as_allowed() -> None:
    for ahead in (0, 1, 3):
        world = World([2] * 10, [9] * 10)
        asyncio.run(world.train(ahead))
        assert [step - min(tokens) for step, tokens in world.learnt][ahead:] == [ahead] * (10 - ahead)


def test_attempts_under_way_write_on_under_new_weights() -> None:
    world = World([5, 30, 30], [5, 5, 5])
    asyncio.run(world.train(1))
    assert len(set(world.learnt[1][1])) > 1


async def _endless(ended: list[int], step: int) -> Any:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(step)


async def test_what_is_under_way_ends_with_the_stage_however_that_ends() -> None:
    ended: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        async with StepsAhead(lambda step: _endless(ended, step), end=9, ahead=2) as attempts:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(attempts.take(0), 0.01)
            raise KeyboardInterrupt
    assert sorted(ended) == [0, 1, 2]


async def test_an_error_in_a_step_is_raised_when_that_step_is_taken() -> None:
    async def roll(step: int) -> Any:
        if step == 1:
            raise OSError("the disk is full")
        return set[int]()

    async with StepsAhead(roll, end=3, ahead=2) as attempts:
        taken = ref(await attempts.take(0))
        with pytest.raises(OSError, match="the disk is full"):
            await attempts.take(1)
        await asyncio.sleep(0)  # until now the loop's own call holds the task of the step before
        assert taken() is None, "attempts that were taken are not held until the stage ends"


async def test_seconds_worked_while_learning_are_those_until_the_last_attempt_ended() -> None:
    gate = asyncio.Event()

    async def roll(step: int) -> Any:
        if step:
            await gate.wait()
        return []

    attempts = StepsAhead(roll, end=2, ahead=1)
    await attempts.take(0)
    began = time.monotonic()
    await asyncio.sleep(0.01)
    assert attempts.under_way and attempts.worked_since(began) >= 0.01
    gate.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    worked = attempts.worked_since(began)
    await asyncio.sleep(0.01)
    assert not attempts.under_way and attempts.worked_since(began) == worked
    assert attempts.worked_since(time.monotonic()) == 0
