"""Attempts that wait for the next step: which they are, that none is lost or drawn twice, and whose weights wrote what."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rocstar.answers.verifier import ScriptedVerifier
from rocstar.engines.scripted import ScriptedEngine
from rocstar.rollout.carry import Carried, OpenGroup, RolledStep, next_limit, rolled
from rocstar.rollout.collect import Roller
from rocstar.tools.scripted import ScriptedTool
from rocstar.types import (
    Completion,
    Finish,
    Group,
    Problem,
    Sampling,
    Stop,
    Trajectory,
    Verdict,
    Weights,
    joined,
    seed_for,
    spans_of,
)
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, STOP, conversation, limits, program
from tests.rollout.test_collect import roller

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


async def whole(made: Roller, count: int = 2) -> Group:
    (group,) = await made.roll([PROBLEM], attempts=count, seed=7)
    return group


async def test_an_attempt_set_aside_at_any_token_goes_on_as_if_it_had_not_been() -> None:
    plain = await whole(roller(Lengthy()), 1)
    (attempt,) = plain.trajectories
    tool = ScriptedTool({"print(2+3)": "5\n"})
    made = replace(roller(Lengthy()), conversation=conversation(tool))
    for most in range(1, attempt.num_sampled_tokens):
        begun = await made.advance(drawn(7, PROBLEM)[0], Sampling(max_new_tokens=1), 1, most)
        (aside,) = begun.group.trajectories
        assert (aside.stop, aside.num_sampled_tokens, aside.outcome) == (Stop.SET_ASIDE, most, None)
        saved = SAVED.validate_json(SAVED.dump_json(Carried(limit=most, groups=(begun,))))
        assert saved == Carried(limit=most, groups=(begun,)) and saved.attempts == 1
        await made.engine.load_weights(Weights(version=most))
        ended = (await made.advance(saved.groups[0], Sampling(max_new_tokens=1), 1, None)).group
        (found,) = ended.trajectories
        assert (found.token_ids, found.loss_mask, found.stop) == (attempt.token_ids, attempt.loss_mask, attempt.stop)
        assert found.outcome is not None and found.results == attempt.results
        wrote = [span for turn in found.turns for span in turn.completion.version_spans]
        assert sum(span.tokens for span in wrote if span.version != most) == most
        await made.engine.load_weights(Weights(version=0))


async def test_what_goes_on_draws_other_random_numbers_than_its_turn_began_with() -> None:
    engine = Lengthy()
    made = roller(engine)
    begun = await made.advance(drawn(7, PROBLEM)[0], Sampling(max_new_tokens=1), 2, 20)
    await made.advance(begun, Sampling(max_new_tokens=1), 2, None)
    assert len({seed for _, seed in engine.asked}) == len(engine.asked)


def test_joined_pieces_of_one_version_are_one_span() -> None:
    first = Completion(token_ids=(1,), logprobs=(-1.0,), finish=Finish.LENGTH, version_spans=spans_of([3]))
    rest = replace(first, finish=Finish.STOP)
    assert joined(first, rest) == replace(
        first, token_ids=(1, 1), logprobs=(-1.0, -1.0), finish=Finish.STOP, version_spans=spans_of([3, 3])
    )
