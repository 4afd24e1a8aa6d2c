"""Attempts that wait for the next step: which they are, that none is lost or drawn twice, whose weights wrote what."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rocstar.config.sections import StageRolloutSection
from rocstar.rollout.carry import Carried, OpenGroup, RolledStep, StepLimit, rolled
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import ToolEnvironment
from rocstar.support.watch import Watch
from rocstar.types import (
    Completion,
    Finish,
    Group,
    Problem,
    Sampling,
    Stop,
    Trajectory,
    Turn,
    Weights,
    joined,
    spans_of,
    without_tokens,
)
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, STOP, conversation, limits, program, roller
from tests.scripted import ScriptedEngine, ScriptedTool

SAMPLING = Sampling(max_new_tokens=1)
SAVED = TypeAdapter(Carried)
TALK = [program("print(2+3)"), "Let me see, that is five, and nothing but five. " * 3 + ANSWER]


class Lengthy(ScriptedEngine):
    """Writes on where a turn was cut, as an engine does; counts its requests."""

    def __init__(self, talks: Any = TALK) -> None:
        super().__init__(CODEC, talks)
        self.asked: list[tuple[str, int]] = []

    async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Completion:
        self.asked.append((names["request_id"], sampling.seed))
        await asyncio.sleep(0)
        session = names["session_id"]
        turn, _, done = names["request_id"].rpartition("/turn")[2].partition("+")
        script = self._scripts(session)
        ids = [*CODEC.encode(script[int(turn)]), STOP][int(done or 0) :][: sampling.max_new_tokens]
        self._produced += len(ids)
        finish = Finish.STOP if ids and ids[-1] == STOP else Finish.LENGTH
        versions = spans_of([self._version] * len(ids))
        return Completion(token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), finish=finish, version_spans=versions)


def drawn(seed: int, *problems: Problem) -> list[OpenGroup]:
    return [OpenGroup(seed=seed, group=Group(problem=problem, trajectories=())) for problem in problems]


def sampled(group: Group) -> list[int]:
    return [trajectory.num_sampled_tokens for trajectory in group.trajectories]


async def set_aside(made: Roller, most: int, count: int) -> OpenGroup:
    """Attempts at a problem up to a limit, beside a group that ends."""
    limit = StepLimit(most, 2, count, 2 * count)

    async def ends(before: Trajectory | None, most: int | None) -> Trajectory:
        return attempt_of("other", 0, without_tokens(Finish.STOP), Stop.ANSWERED)

    begun = made.advance(drawn(7, PROBLEM)[0], limit, sampling=SAMPLING, attempts=count)
    return (await asyncio.gather(begun, *(limit.attempt("other", ends) for _ in range(count))))[0]


async def whole(made: Roller, count: int = 2) -> Group:
    (group,) = await made.roll([PROBLEM], attempts=count, seed=7)
    return group


async def test_an_attempt_set_aside_at_any_token_goes_on_as_if_it_had_not_been() -> None:
    plain = await whole(roller(Lengthy()), 1)
    (attempt,) = plain.trajectories
    tool = ScriptedTool({"print(2+3)": "5\n"})
    made = replace(roller(Lengthy()), conversation=conversation(tool))
    for most in range(1, attempt.num_sampled_tokens):
        begun = await set_aside(made, most, 1)
        (aside,) = begun.group.trajectories
        assert (aside.stop, aside.num_sampled_tokens, aside.outcome) == (Stop.SET_ASIDE, most, None)
        saved = SAVED.validate_json(SAVED.dump_json(Carried(limit=most, groups=(begun,))))
        assert saved == Carried(limit=most, groups=(begun,)) and saved.attempts == 1
        await made.engine.load_weights(Weights(version=most))
        ended = (await made.advance(saved.groups[0], None, sampling=SAMPLING, attempts=1)).group
        (found,) = ended.trajectories
        assert (found.token_ids, found.loss_mask, found.stop) == (attempt.token_ids, attempt.loss_mask, attempt.stop)
        assert found.outcome is not None and found.results == attempt.results
        wrote = [span for turn in found.turns for span in turn.completion.version_spans]
        assert sum(span.tokens for span in wrote if span.version != most) == most
        await made.engine.load_weights(Weights(version=0))


class Own(ScriptedTool):
    async def close(self) -> None:
        pass


async def test_calls_that_were_not_run_for_their_number_are_not_run_when_the_attempt_goes_on() -> None:
    shared, own = ScriptedTool({"1": "1"}), Own({"2": "2", "3": "3"}, name="notebook")
    talk = conversation(shared)
    calls = talk.calls(
        Completion(
            token_ids=tuple(CODEC.encode(program("1") + program("2", "notebook") + program("3", "notebook"))),
            logprobs=(),
            finish=Finish.STOP,
            version_spans=(),
        ),
        0,
    )
    assert len(calls) == 3
    made = ToolEnvironment(PROBLEM, replace(talk, own_tools=lambda: [own]), limits(), seed=1)
    await made.again([Turn(completion=without_tokens(Finish.STOP), calls=tuple(calls))])
    assert [call.arguments["code"] for call in own.calls] == ["2"]


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_branch_that_carries_nothing_over_completes_what_was_carried_once(ahead: int) -> None:
    pytest.importorskip("torch")
    from rocstar.train import ahead_of_learning

    made = roller(Lengthy())
    left = Carried(limit=5, groups=(await set_aside(made, 5, 2),))
    rollout = StageRolloutSection(problems_per_step=1, attempts_per_problem=2, max_staleness_steps=ahead)
    stage: Any = SimpleNamespace(name="s", steps=4, rollout=rollout)
    progress = SimpleNamespace(step=2, stage_step=2, carried=left)
    seeded = SimpleNamespace(run=SimpleNamespace(seed=0))
    run: Any = SimpleNamespace(recipe=seeded, progress=progress, watch=Watch(), calls=None)
    async with ahead_of_learning(run, stage, made, [PROBLEM]) as attempts:
        first = await attempts.take(2)
        progress.stage_step, progress.carried = 3, first.left
        second = await attempts.take(3)
    assert [len(step.groups) for step in (first, second)] == [2, 1] and first.left == second.left == Carried()


@pytest.mark.parametrize("most", [5, 60])
async def test_an_attempt_that_has_more_than_a_branch_allows_ends_as_it_is(most: int) -> None:
    """In its first turn or in a later one."""
    made = roller(Lengthy())
    begun = await set_aside(made, most, 1)
    shorter = replace(made, limits=limits(max_response_tokens=4))
    (found,) = (await shorter.advance(begun, None, sampling=SAMPLING, attempts=1)).group.trajectories
    assert (found.stop, found.num_sampled_tokens, found.fault) == (Stop.MAX_TOKENS, most, None)


async def test_a_group_goes_on_with_the_attempts_it_began_with_and_draws_other_random_numbers() -> None:
    """As many attempts as it began with, whatever the recipe of a branch says."""
    engine = Lengthy()
    made = roller(engine)
    begun = await set_aside(made, 20, 2)
    group = (await made.advance(begun, None, sampling=SAMPLING, attempts=3)).group
    assert [each.index for each in group.trajectories] == [0, 1]
    again = await made.advance(replace(begun, group=group), None, sampling=SAMPLING, attempts=2)
    assert again.group.trajectories == group.trajectories, "what has ended is left as it is"
    assert len({seed for _, seed in engine.asked}) == len(engine.asked)


def test_joined_pieces_of_one_version_are_one_span() -> None:
    first = Completion(token_ids=(1,), logprobs=(-1.0,), finish=Finish.LENGTH, version_spans=spans_of([3]))
    rest = replace(first, finish=Finish.STOP)
    assert joined(first, rest) == replace(
        first, token_ids=(1, 1), logprobs=(-1.0, -1.0), finish=Finish.STOP, version_spans=spans_of([3, 3])
    )


lengths = st.lists(st.lists(st.integers(1, 60), min_size=3, max_size=3), min_size=2, max_size=4)


async def planned(group: OpenGroup, limit: StepLimit | None, steps: list[list[list[int]]], rng: Random) -> OpenGroup:
    """`Roller.advance` for attempts whose lengths are planned (0 of a fault); `group.seed` is the step that drew the
    group. They take times that have nothing to do with their lengths."""
    name = group.group.problem.id

    async def attempt(index: int, size: int) -> Trajectory:
        async def go_on(before: Trajectory | None, most: int | None) -> Trajectory:
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            tokens = size if most is None else min(size, most)
            wrote = Completion(token_ids=(0,) * tokens, logprobs=(0.0,) * tokens, finish=Finish.LENGTH)
            ended = Stop.ANSWERED if size else Stop.ENVIRONMENT_FAILED
            return attempt_of(name, index, wrote, ended if tokens == size else Stop.SET_ASIDE)

        return await (limit.attempt(name, go_on) if limit else go_on(None, None))

    trajectories = await asyncio.gather(*(attempt(*one) for one in enumerate(steps[group.seed][int(name)])))
    return replace(group, group=replace(group.group, trajectories=tuple(trajectories)))


def attempt_of(name: str, index: int, wrote: Completion, stop: Stop) -> Trajectory:
    return Trajectory(problem_id=name, index=index, prompt_ids=(1,), turns=(Turn(completion=wrote),), stop=stop)


async def roll_all(steps: list[list[list[int]]], share: float, seed: int = 0) -> list[RolledStep]:
    found, left = [], Carried()
    for number, sizes in enumerate(steps):
        groups = drawn(number, *(replace(PROBLEM, id=str(place)) for place in range(len(sizes))))
        advance = partial(planned, steps=steps, rng=Random(seed))
        found.append(await rolled(advance, left, groups, attempts=3, share=share, last=number + 1 == len(steps)))
        left = found[-1].left
    return found


@given(steps=st.lists(lengths, min_size=1, max_size=6), share=st.floats(0.05, 0.9))
@settings(deadline=None)
def test_every_attempt_is_learnt_from_once_whole_and_at_most_a_step_late(
    steps: list[list[list[int]]], share: float
) -> None:
    found = asyncio.run(roll_all(steps, share))
    assert found == asyncio.run(roll_all(steps, share, seed=1)), "tokens decide, not time"
    learnt = Counter((g.problem.id, tuple(sampled(g))) for step in found for g in step.groups)
    assert learnt == Counter((str(place), tuple(sizes)) for step in steps for place, sizes in enumerate(step))
    assert not found[0].left.groups and not found[-1].left.groups
    for number, step in enumerate(found):
        assert step.left.attempts <= share * 3 * len(steps[number])
        assert {group.seed for group in step.left.groups} <= {number}, "carried once"
        assert step.groups, "a step learns from something"


async def test_faults_say_nothing_of_how_long_attempts_are() -> None:
    sizes = [[20, 21, 22], [23, 24, 25], [26, 27, 28], [29, 30, 31]]
    faults = [[0, 0, 0] for _ in sizes]
    found = await roll_all([sizes, faults, [[0, 24, 0], *faults[1:]], sizes], 0.25)
    assert [step.left.limit for step in found] == [29, 29, 24, None]
