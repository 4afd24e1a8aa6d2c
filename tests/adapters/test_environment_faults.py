"""What an environment of others does wrong is a fault; what the model did, or a limit of the run, is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from rocstar.adapters.environments import faults_of
from rocstar.agents.agent import Client, GatewayAgent, by_function
from rocstar.types import Finish, Problem, Stop, Trajectory
from tests.agents.examples import Told
from tests.rollout.examples import ANSWER, PROBLEM, limits, roller

ASKED = [{"role": "user", "content": PROBLEM.question}]


class Slow(Told):
    """Answers after a second."""

    async def generate(self, *given: Any, **names: Any) -> Any:
        await asyncio.sleep(1.0)
        return await super().generate(*given, **names)


async def made(
    ends: Callable[[Client], Awaitable[Any]], engine: Told | None = None, *, seconds: float = 20.0, **within: int
) -> Trajectory:
    """An attempt in which an environment asks the model once, and then ends so."""

    async def plays(problem: Problem, client: Client) -> float:
        with faults_of(client):
            await client.chat(ASKED)
            await ends(client)
        return 1.0

    agent = GatewayAgent(partial(by_function, plays), seconds=seconds, at_once=None, right_above=0.5)
    drawn = roller(engine or Told([ANSWER] * 3), agent=agent, limits=limits(**within))
    (group,) = await drawn.roll([PROBLEM], attempts=1, seed=1)
    return group.trajectories[0]


async def raises(error: BaseException) -> None:
    raise error


async def hangs(client: Client) -> None:
    await asyncio.Event().wait()


async def cleans_up(client: Client) -> None:
    """It gives a reward after all, once it is told to end."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("error", [ConnectionError("gone"), SystemExit("bye"), asyncio.CancelledError("gone")])
async def test_what_an_environment_raises_is_a_fault(error: BaseException) -> None:
    found = await made(lambda client: raises(error))
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.outcome is None
    assert found.fault == f"the environment failed: {type(error).__name__}: {error}"


@pytest.mark.parametrize("ends", [hangs, cleans_up])
async def test_an_environment_that_does_not_answer_in_time_is_a_fault(ends: Callable[[Client], Awaitable[Any]]) -> None:
    found = await made(ends, seconds=0.5)
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.outcome is None
    assert found.fault == "the environment did not end within rollout.agent_seconds = 0.5"


async def test_the_time_that_a_model_takes_to_answer_is_none_of_the_environments() -> None:
    found = await made(lambda client: asyncio.sleep(0), Slow([ANSWER]), seconds=0.5)
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 1.0


async def test_an_environment_that_fails_after_a_cut_answer_is_a_fault() -> None:
    found = await made(lambda client: raises(ConnectionError("gone")), max_response_tokens=2)
    assert found.turns[-1].completion.finish is Finish.LENGTH
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.outcome is None


@pytest.mark.parametrize(
    ("limits", "stop"), [({"max_turns": 1}, Stop.MAX_TURNS), ({"max_response_tokens": 6}, Stop.MAX_TOKENS)]
)
@pytest.mark.parametrize("then", [lambda client: raises(ValueError("no answer")), hangs])
async def test_a_request_that_a_limit_of_the_run_refused_is_no_fault_of_the_environment(
    then: Callable[[Client], Awaitable[Any]], limits: dict[str, int], stop: Stop
) -> None:
    async def goes_on(client: Client) -> None:
        with pytest.raises(Exception, match=r"rollout\.max_"):
            await client.chat([*ASKED, {"role": "assistant", "content": "x" * 500}, *ASKED])
        await then(client)

    found = await made(goes_on, seconds=0.5, **limits)
    assert found.stop is (Stop.AGENT_TIMEOUT if then is hangs else stop) and found.outcome


async def test_a_refusal_that_an_answer_came_after_excuses_no_environment() -> None:
    async def goes_on(client: Client) -> None:
        with pytest.raises(Exception, match="max_response_tokens"):
            await client.chat([{"role": "user", "content": "x" * 1000}])
        await client.chat(ASKED)
        raise ConnectionError("gone")

    assert (await made(goes_on)).stop is Stop.ENVIRONMENT_FAILED
