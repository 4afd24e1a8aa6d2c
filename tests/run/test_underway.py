"""What is said of a step under way: attempts, tokens and calls so far, and about how long is left."""

from __future__ import annotations

import io
from dataclasses import replace

from rocstar.rollout.collect import Roller
from rocstar.run.ahead import Attempts, update_summary
from rocstar.support.screen import Screen
from rocstar.support.watch import RUN, Watch
from rocstar.types import EngineLoad, Problem, Sampling, Trajectory
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, program, roller
from tests.rollout.test_collect import OTHER
from tests.scripted import Clock, ScriptedEngine


async def test_attempts_and_their_calls_are_counted_as_they_end_and_nothing_else_changes() -> None:
    async def agent(roller: Roller, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        return await plain.attempt(problem, index, sampling)

    plain = roller(ScriptedEngine(CODEC, [program("print(2+3)"), ANSWER]))
    attempts = Attempts(6)
    groups = await replace(plain, ended=attempts.count).roll([PROBLEM, OTHER], attempts=3, seed=1)
    assert (attempts.done, attempts.calls) == (6, 6)
    written = [[t.turns[0].results for t in group.trajectories] for group in groups]
    again = await plain.roll([PROBLEM, OTHER], attempts=3, seed=1)
    assert written == [[t.turns[0].results for t in group.trajectories] for group in again]
    attempts = Attempts(3)
    await replace(plain, agent=agent, ended=attempts.count).roll([PROBLEM], attempts=3, seed=1)
    assert (attempts.done, attempts.calls) == (3, 3)


def test_a_log_hears_how_far_a_rollout_is_and_from_the_second_step_on_how_long_it_will_take() -> None:
    clock, log = Clock(), io.StringIO()
    watch, screen = Watch(clock), Screen(progress=log, clock=clock)
    attempts = Attempts(128)
    for expected in (None, 40.0):
        watch.note(RUN, "rollout")
        watch.note("p/0", "an engine")
        began, attempts.done, attempts.calls = clock.now, 31, 44
        with watch.telling(lambda seconds, expected=expected: attempts.summary(seconds, int(500 * seconds), expected)):  # type: ignore[misc]
            while clock.now < began + 10:
                clock.now += 1.0
                screen.look(watch.doing)
        watch.note("p/0", None)
        watch.note(RUN, None)
    assert log.getvalue().splitlines() == [
        "rollout for 10 s: 31 of 128 attempts done, 500 tokens/s, 44 calls run; 1 waits for an engine",
        "rollout for 10 s: 31 of 128 attempts done, 500 tokens/s, 44 calls run, about 30 s left; 1 waits for an engine",
    ]
    assert "left" not in attempts.summary(50.0, 1, 40.0)  # it took longer than the step before


def test_an_evaluation_under_way_says_its_tokens_a_second() -> None:
    clock = Clock()
    watch, load = Watch(clock), EngineLoad(capacity_tokens=0, used_tokens=0, running=1, waiting=0, produced_tokens=100)
    watch.load = lambda: load
    watch.note(RUN, "evaluation")
    clock.now, load = 5.0, replace(load, produced_tokens=600)
    watch.note("p/0", "an engine")
    assert watch.doing() == "evaluation for 5 s: 100 tokens/s; 1 waits for an engine"


def test_an_update_under_way_says_its_tokens_a_second() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.note(RUN, "sft")
    clock.now = 5.0
    with watch.telling(lambda seconds: update_summary(seconds, 0, 8000)):
        assert watch.doing() == "sft for 5 s"  # nothing is known before the first pass has ended
    with watch.telling(lambda seconds: update_summary(seconds, 2000, 8000)):
        assert watch.doing() == "sft for 5 s: 2000 of 8000 tokens, 400 tokens/s, about 15 s left"
    assert watch.doing() == "sft for 5 s"
