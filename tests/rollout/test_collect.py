"""All attempts of a step: who is seeded how, and what happens to faults of the verifier and to real errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rocstar.answers.verifier import ScriptedVerifier
from rocstar.engines.scripted import ScriptedEngine
from rocstar.errors import ConfigError, VerifierUnavailable
from rocstar.protocols import Engine, Verifier
from rocstar.rollout.collect import Roller
from rocstar.tools.scripted import ScriptedTool
from rocstar.types import Completion, Outcome, Problem, Sampling, Stop, Trajectory, Verdict
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, STOP, Endless, conversation, limits, program

OTHER = replace(PROBLEM, id="other", question="And 3 + 3?")


class Listening(ScriptedEngine):
    """Remembers the seed of each session's requests."""

    def __init__(self) -> None:
        super().__init__(CODEC, [program("print(2+3)"), ANSWER])
        self.seeds: list[int] = []

    async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
        self.seeds.append(sampling.seed)
        return await super().generate(token_ids, sampling, **names)


def roller(engine: Engine, verifier: Verifier | None = None) -> Roller:
    return Roller(
        engine=engine,
        conversation=conversation(ScriptedTool({"print(2+3)": "5\n"})),
        verifier=verifier or ScriptedVerifier(lambda problem, trajectory: Verdict.RIGHT),
        limits=limits(),
        stop_token_ids=(STOP,),
    )


async def test_every_problem_gets_its_attempts_in_order() -> None:
    told: list[Trajectory] = []
    groups = await roller(Listening()).roll([PROBLEM, OTHER], attempts=3, seed=1, done=told.append)
    assert [group.problem for group in groups] == [PROBLEM, OTHER]
    assert [[t.index for t in group.trajectories] for group in groups] == [[0, 1, 2]] * 2
    assert {t.problem_id for t in groups[1].trajectories} == {"other"}
    assert all(t.outcome and t.outcome.reward == 1 for group in groups for t in group.trajectories)
    assert len(told) == 6


async def test_seeds_follow_from_identity_not_from_order() -> None:
    both, one = Listening(), Listening()
    await roller(both).roll([PROBLEM, OTHER], attempts=2, seed=1)
    await roller(one).roll([OTHER], attempts=1, seed=1)
    assert len(set(both.seeds)) == 8  # four attempts of two turns
    assert set(one.seeds) < set(both.seeds)
    again = Listening()
    await roller(again).roll([OTHER], attempts=1, seed=2)
    assert not set(again.seeds) & set(both.seeds)


async def test_a_verifier_that_is_gone_is_our_fault_and_no_reward() -> None:
    class Gone:
        async def verify(self, problem: Problem, trajectory: Trajectory) -> Outcome:
            raise VerifierUnavailable("worker lost")

    (group,) = await roller(Listening(), Gone()).roll([PROBLEM], attempts=2, seed=1)
    for trajectory in group.trajectories:
        assert (trajectory.stop, trajectory.outcome) == (Stop.ENVIRONMENT_FAILED, None)
        assert trajectory.fault == "VerifierUnavailable: worker lost"


async def test_an_error_of_the_person_is_told_plainly_and_ends_all_attempts() -> None:
    class Refusing(Endless):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
            if names["session_id"].endswith("/1"):
                await self.asked.wait()
                raise ConfigError("the prompt is too long")
            return await super().generate(token_ids, sampling, **names)

    engine = Refusing()
    with pytest.raises(ConfigError, match="the prompt is too long"):
        await roller(engine).roll([PROBLEM], attempts=3, seed=1)
    assert engine.cancelled and len(engine.closed) == 3


async def test_cancelling_a_roll_cancels_its_attempts() -> None:
    engine = Endless()
    task = asyncio.create_task(roller(engine).roll([PROBLEM], attempts=2, seed=1))
    await engine.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled and len(engine.closed) == 2
