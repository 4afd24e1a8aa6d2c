"""Penalties against eq. 4-5, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocstar.config.sections import ResampleSection
from rocstar.learning.quality import has_void_turn, penalty, repeated_share
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Outcome,
    Penalty,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)

PAPER = ResampleSection()
OK, BAD, LATE, BROKEN = Status.OK, Status.CODE_ERROR, Status.TIMEOUT, Status.BAD_CALL


def turn(*statuses: Status, stdout: str = "") -> Turn:
    names = [f"call{number}" for number in range(len(statuses))]
    return Turn(
        completion=Completion(token_ids=(1,), logprobs=(0.0,), finish=Finish.STOP),
        calls=tuple(ToolCall(id=name, tool="python", arguments={}, raw="") for name in names),
        results=tuple(
            ToolResult(call_id=name, status=status, stdout=stdout) for name, status in zip(names, statuses, strict=True)
        ),
    )


def attempt(*turns: Turn, answer_tags: int = 1, outcome: bool = True) -> Trajectory:
    facts = FormatFacts(answer_tags=answer_tags, reason_after_answer=False, boxed=True)
    found = Outcome(verdict=Verdict.RIGHT, reward=1.0, extracted="1", method="integer", format_facts=facts)
    return Trajectory(
        problem_id="p",
        index=0,
        prompt_ids=(0,),
        turns=turns,
        stop=Stop.ANSWERED,
        outcome=found if outcome else None,
    )


@pytest.mark.parametrize(
    ("made", "errors", "form"),
    [
        (attempt(turn()), 0.5, 0.0),
        (attempt(turn(OK, stdout="mean error: 0.1"), turn()), 0.0, 0.0),
        (attempt(turn(BAD), turn(OK), turn()), 1 / 2, 0.0),
        (attempt(turn(BAD), turn(LATE), turn(BROKEN), turn()), 1.0, 0.0),
        (attempt(turn(OK, BAD, OK), turn(OK), turn()), 1 / 4, 0.0),
        (attempt(turn(OK), turn(), answer_tags=0), 0.0, 1.0),
        (attempt(turn(OK), turn(OK), turn(OK), turn(), answer_tags=2), 0.0, 1 / 4),
        (attempt(turn(OK), turn(), answer_tags=9), 0.0, 1.0),
        (attempt(turn(), answer_tags=0), 0.5, 1.0),
    ],
)
def test_penalties_follow_the_two_equations(made: Trajectory, errors: float, form: float) -> None:
    assert penalty(made, PAPER) == Penalty(errors=errors, format=form)


def test_an_attempt_without_outcome_or_turns_has_a_penalty_too_and_the_total_is_the_sum() -> None:
    assert penalty(attempt(outcome=False), PAPER) == Penalty(errors=0.5, format=1.0)
    assert penalty(attempt(turn(OK), outcome=False), PAPER).total == 1.0
    assert penalty(attempt(turn(BAD), turn(), answer_tags=2), PAPER).total == 1.0 + 0.5


def wrote(*turns: list[int]) -> Trajectory:
    completions = [Completion(token_ids=tuple(ids), logprobs=(0.0,) * len(ids), finish=Finish.STOP) for ids in turns]
    return attempt(*(Turn(completion=completion) for completion in completions))


def test_five_grams_are_repeated_from_the_sixth_time_on_never_over_turns_and_count_where_that_is_asked_for() -> None:
    once = list(range(100, 106))  # two 5-grams
    assert repeated_share(wrote(*[[1, 2, 3, 4, 5]] * 5)) == 0.0
    assert repeated_share(wrote(*[[1, 2, 3, 4, 5]] * 6, once)) == 6 / 8
    assert repeated_share(wrote([1], [2, 3, 4, 5])) == repeated_share(wrote([])) == 0.0
    looping = wrote([1, 2, 3, 4, 5] * 8)
    assert penalty(looping, PAPER).repetition == 0.0
    assert penalty(looping, ResampleSection(repetition_weight=0.5)).total == penalty(looping, PAPER).total + 0.5


@pytest.mark.parametrize(("answer", "void"), [("1", False), (None, True)])
def test_a_turn_is_void_without_a_call_that_parses_and_without_the_answer(answer: str | None, void: bool) -> None:
    def ends(*turns: Turn) -> bool:
        made = attempt(*turns, answer_tags=0)
        assert made.outcome
        facts = replace(made.outcome.format_facts, boxed=answer is not None)
        return has_void_turn(replace(made, outcome=replace(made.outcome, extracted=answer, format_facts=facts)))

    broken = turn(BROKEN)
    broken = replace(broken, calls=tuple(replace(call, parse_error="no JSON") for call in broken.calls))
    assert ends(turn()) is ends(turn(OK), turn()) is ends(turn(OK), broken) is void
    assert not ends(turn(OK), turn(BAD))  # the limit of turns ended it
    assert ends(broken, turn(OK)) and ends(turn(), turn(OK), turn())
