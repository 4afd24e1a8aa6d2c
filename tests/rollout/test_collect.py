"""All attempts of a step: who is seeded how, and what happens to faults of the verifier and to real errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rocstar.errors import ConfigError, EngineUnavailable, VerifierUnavailable
from rocstar.types import Completion, Finish, Outcome, Problem, Sampling, Stop, Trajectory, Verdict
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, Endless, program, roller
from tests.scripted import ScriptedEngine, ScriptedVerifier

OTHER = replace(PROBLEM, id="other", question="And 3 + 3?")


class Listening(ScriptedEngine):
    """Remembers the seed of each session's requests."""

    def __init__(self) -> None:
        super().__init__(CODEC, [program("print(2+3)"), ANSWER])
        self.seeds: list[int] = []
        self.requests: list[str] = []
        self.sessions: set[str] = set()

    async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
        self.seeds.append(sampling.seed)
        self.requests.append(names["request_id"])
        self.sessions.add(names["session_id"])
        return await super().generate(token_ids, sampling, **names)


async def test_every_problem_gets_its_attempts_in_order() -> None:
    groups = await roller(Listening()).roll([PROBLEM, OTHER], attempts=3, seed=1)
    assert [group.problem for group in groups] == [PROBLEM, OTHER]
    assert [[t.index for t in group.trajectories] for group in groups] == [[0, 1, 2]] * 2
    assert {t.problem_id for t in groups[1].trajectories} == {"other"}
    assert all(t.outcome and t.outcome.reward == 1 for group in groups for t in group.trajectories)


async def test_seeds_follow_from_identity_not_from_order() -> None:
    both, one = Listening(), Listening()
    await roller(both).roll([PROBLEM, OTHER], attempts=2, seed=1)
    await roller(one).roll([OTHER], attempts=1, seed=1)
    assert len(set(both.seeds)) == 8  # four attempts of two turns
    assert set(one.seeds) < set(both.seeds)
    again = Listening()
    await roller(again).roll([OTHER], attempts=1, seed=2)
    assert not set(again.seeds) & set(both.seeds)


async def test_a_problem_that_stands_twice_is_drawn_twice() -> None:
    once, twice = Listening(), Listening()
    await roller(once).roll([PROBLEM, OTHER], attempts=2, seed=1)
    groups = await roller(twice).roll([PROBLEM, OTHER, PROBLEM, PROBLEM], attempts=2, seed=1)
    assert [group.problem for group in groups] == [PROBLEM, OTHER, PROBLEM, PROBLEM]
    assert len(twice.sessions) == 8
    assert len(set(twice.requests)) == len(set(twice.seeds)) == 16  # two turns each
    assert set(once.seeds) < set(twice.seeds) and once.sessions < twice.sessions


async def test_attempts_of_the_next_step_take_the_places_of_those_that_ended_and_no_more() -> None:
    """Two steps are asked at once, four attempts each, and there are four places."""

    class Slow(Listening):
        under_way, most = 0, 0

        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1
            return await super().generate(token_ids, sampling, **names)

    engine, ended = Slow(), []
    paced = replace(roller(engine), places=asyncio.Semaphore(4))

    async def step(seed: int) -> None:
        await paced.roll([PROBLEM, OTHER], attempts=2, seed=seed)
        ended.append(seed)

    await asyncio.gather(step(1), step(2))
    assert engine.most == 4 and ended == [1, 2]
    early, late = engine.seeds[:8], engine.seeds[8:]
    alone = Listening()
    await roller(alone).roll([PROBLEM, OTHER], attempts=2, seed=1)
    assert sorted(early) == sorted(alone.seeds) and not set(late) & set(early)


class Counting(ScriptedVerifier):
    """Remembers what it was asked in each call."""

    def __init__(self, decide: Callable[[Problem, Trajectory], Verdict]) -> None:
        super().__init__(decide)
        self.calls: list[list[tuple[str, int]]] = []

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        self.calls.append([(problem.id, trajectory.index) for problem, trajectory in attempts])
        return await super().verify_all(attempts)


async def test_a_group_is_verified_while_another_still_runs() -> None:
    """The other problem's attempts never end; the verdicts of the first are there all the same."""

    class OneNeverEnds(Endless):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
            if OTHER.id in names["session_id"]:
                return await super().generate(token_ids, sampling, **names)
            ids = tuple(CODEC.encode(ANSWER))
            return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)

    asked = asyncio.Event()

    def decide(problem: Problem, trajectory: Trajectory) -> Verdict:
        asked.set()
        return Verdict.RIGHT

    verifier = Counting(decide)
    task = asyncio.create_task(roller(OneNeverEnds(), verifier=verifier).roll([OTHER, PROBLEM], attempts=2, seed=1))
    await asyncio.wait_for(asked.wait(), 30)
    assert verifier.calls == [[(PROBLEM.id, 0), (PROBLEM.id, 1)]] and not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_verdict_that_could_not_be_had_costs_the_others_nothing() -> None:
    def decide(problem: Problem, trajectory: Trajectory) -> Verdict:
        if trajectory.index == 1:
            raise VerifierUnavailable("worker lost")
        return Verdict.UNDECIDED if trajectory.index == 2 else Verdict.RIGHT

    (group,) = await roller(Listening(), verifier=ScriptedVerifier(decide)).roll([PROBLEM], attempts=4, seed=1)
    lost = group.trajectories[1]
    assert (lost.stop, lost.outcome, lost.fault) == (Stop.ENVIRONMENT_FAILED, None, "worker lost")
    verdicts = [t.outcome.verdict if t.outcome else None for t in group.trajectories]
    assert verdicts == [Verdict.RIGHT, None, Verdict.UNDECIDED, Verdict.RIGHT]


async def test_an_attempt_that_failed_by_our_fault_is_not_verified() -> None:
    class Failing(Listening):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
            if names["session_id"].endswith("/0"):
                raise EngineUnavailable("gone")
            return await super().generate(token_ids, sampling, **names)

    verifier = Counting(lambda problem, trajectory: Verdict.RIGHT)
    (group,) = await roller(Failing(), verifier=verifier).roll([PROBLEM], attempts=2, seed=1)
    assert verifier.calls == [[(PROBLEM.id, 1)]]
    assert [t.stop for t in group.trajectories] == [Stop.ENVIRONMENT_FAILED, Stop.ANSWERED]


async def test_a_verifier_that_is_gone_is_our_fault_and_no_reward() -> None:
    class Gone:
        async def verify_all(
            self, attempts: Sequence[tuple[Problem, Trajectory]]
        ) -> list[Outcome | VerifierUnavailable]:
            raise VerifierUnavailable("worker lost")

    (group,) = await roller(Listening(), verifier=Gone()).roll([PROBLEM], attempts=2, seed=1)
    for trajectory in group.trajectories:
        assert (trajectory.stop, trajectory.outcome) == (Stop.ENVIRONMENT_FAILED, None)
        assert trajectory.fault == "worker lost"


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
