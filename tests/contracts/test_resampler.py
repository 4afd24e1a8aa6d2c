"""The Resampler contract, over every implementation: pure, total, never invents, never compares the incomparable."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.config.sections import ResampleSection
from rocstar.errors import ConfigError
from rocstar.learning.resample import METHODS, resampler_of
from rocstar.protocols import Resampler
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Problem,
    Reason,
    Status,
    Stop,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from tests.contracts.own import own

KEEP = 4


def named(method: str, **more: Any) -> Resampler:
    return resampler_of(ResampleSection.model_validate({"method": method, "keep": KEEP, **more}))


BUILT_IN = [pytest.param(named(name), name, id=name) for name in METHODS] + [
    pytest.param(named("roc_release", min_positive=1, min_negative=1), "roc_release", id="roc_release, lower minima"),
    pytest.param(named("roc", repetition_weight=1.0, drop_truncated=True), "roc", id="roc, what the paper tried"),
]
OWN = [pytest.param(named(name), name, id=name) for name in own("resample.method", "Balanced")]
every_resampler = pytest.mark.parametrize(("resampler", "method"), [*BUILT_IN, *OWN])
built_in_resampler = pytest.mark.parametrize(("resampler", "method"), BUILT_IN)

Kind = tuple[str, int, int]
"""(verdict or "fault", failed calls, calls)."""
KINDS = st.tuples(st.sampled_from(["right", "wrong", "undecided", "fault"]), st.integers(0, 2), st.integers(2, 3))


def trajectory(index: int, kind: Kind) -> Trajectory:
    name, failed, calls = kind
    results = tuple(
        ToolResult(call_id=str(number), status=Status.CODE_ERROR if number < failed else Status.OK)
        for number in range(calls)
    )
    facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
    outcome = None
    if name != "fault":
        outcome = Outcome(
            verdict=Verdict(name), reward=float(name == "right"), extracted=None, method="test", format_facts=facts
        )
    return Trajectory(
        problem_id="p",
        index=index,
        prompt_ids=(0,),
        turns=(Turn(completion=Completion(token_ids=(1,), logprobs=(0.0,), finish=Finish.STOP), results=results),),
        stop=Stop.ANSWERED if outcome else Stop.ENVIRONMENT_FAILED,
        outcome=outcome,
        fault=None if outcome else "sandbox is down",
    )


def group(*kinds: Kind) -> Group:
    return Group(
        problem=Problem(id="p", question="?", answer="1"),
        trajectories=tuple(trajectory(index, kind) for index, kind in enumerate(kinds)),
    )


RIGHT, WRONG, UNDECIDED, FAULT = ("right", 0, 2), ("wrong", 0, 2), ("undecided", 0, 2), ("fault", 0, 2)


@every_resampler
@given(kinds=st.lists(KINDS, max_size=16), seed=st.integers())
def test_every_sibling_gets_one_choice_in_order_and_only_comparable_ones_are_kept(
    resampler: Resampler, method: str, kinds: list[Kind], seed: int
) -> None:
    siblings = group(*kinds)
    result = resampler(siblings, random.Random(seed))
    assert result.group is siblings
    assert [choice.index for choice in result.choices] == list(range(len(kinds)))
    assert all(choice.kept == choice.reason.value.startswith("kept.") for choice in result.choices)
    assert len(result.kept) + len(result.dropped) == len(kinds)
    assert all(kept.outcome and kept.outcome.verdict is not Verdict.UNDECIDED for kept in result.kept)


@every_resampler
@given(kinds=st.lists(KINDS, max_size=16), seed=st.integers())
def test_what_is_kept_has_a_signal_and_is_not_too_much(
    resampler: Resampler, method: str, kinds: list[Kind], seed: int
) -> None:
    kept = resampler(group(*kinds), random.Random(seed)).kept
    assert method == "all" or len(kept) <= KEEP
    assert not kept or {attempt.outcome.reward for attempt in kept if attempt.outcome} == {0.0, 1.0}


@built_in_resampler
@given(kinds=st.lists(KINDS, max_size=16), seed=st.integers())
def test_what_is_kept_has_the_right_size(resampler: Resampler, method: str, kinds: list[Kind], seed: int) -> None:
    result = resampler(group(*kinds), random.Random(seed))
    usable = [name for name, _, _ in kinds if name in ("right", "wrong")]
    size = len(usable) if method == "all" else min(len(usable), KEEP)
    if method != "uniform":  # a blind draw may lose a class, and drops the group then
        assert len(result.kept) == (size if len(set(usable)) == 2 else 0)
    if result.kept:
        assert len(result.kept) == size
        assert {kept.outcome.reward for kept in result.kept if kept.outcome} == {0.0, 1.0}


@every_resampler
@given(kinds=st.lists(KINDS, max_size=16), seed=st.integers())
def test_the_same_rng_state_gives_the_same_choice(
    resampler: Resampler, method: str, kinds: list[Kind], seed: int
) -> None:
    siblings = group(*kinds)
    assert resampler(siblings, random.Random(seed)) == resampler(siblings, random.Random(seed))


@every_resampler
@pytest.mark.parametrize("kind", [RIGHT, WRONG])
def test_equal_rewards_drop_the_group(resampler: Resampler, method: str, kind: Kind) -> None:
    result = resampler(group(*[kind] * 6), random.Random(0))
    assert {choice.reason for choice in result.choices} == {Reason.DROPPED_EQUAL_REWARDS}


@every_resampler
def test_every_kind_of_loss_has_its_own_reason(resampler: Resampler, method: str) -> None:
    reasons = [choice.reason for choice in resampler(group(RIGHT, UNDECIDED, FAULT), random.Random(0)).choices]
    assert reasons == [Reason.DROPPED_TOO_FEW, Reason.DROPPED_UNDECIDED, Reason.DROPPED_ENVIRONMENT]


@built_in_resampler
def test_short_groups_are_kept_whole(resampler: Resampler, method: str) -> None:
    result = resampler(group(RIGHT, WRONG, FAULT, WRONG), random.Random(0))
    assert [choice.kept for choice in result.choices] == [True, True, False, True]
    assert {choice.reason for choice in result.choices if choice.kept} == {Reason.KEPT_ALL}


@every_resampler
def test_an_empty_group_gives_no_choices(resampler: Resampler, method: str) -> None:
    assert resampler(group(), random.Random(0)).choices == ()


def test_the_release_form_keeps_the_cleanest_successes_and_the_first_failures() -> None:
    kinds = [("right", failed, 2) for failed in (2, 0, 1, 0)] + [WRONG] * 4
    result = named("roc_release")(group(*kinds), random.Random(0))
    assert [kept.index for kept in result.kept] == [1, 3, 4, 5]
    assert result.choices[0].reason is Reason.DROPPED_HIGHER_PENALTY
    assert result.choices[0].penalty.errors == 1.0


def test_the_paper_form_records_the_weight_of_each_draw() -> None:
    kinds = [("right", failed, 2) for failed in (2, 0, 1, 0)] + [WRONG] * 4
    weights = [choice.weight for choice in named("roc")(group(*kinds), random.Random(0)).choices]
    assert weights == pytest.approx([1 / 1.01, 100.0, 1 / 0.51, 100.0, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("method", METHODS)
def test_overlong_filtering_leaves_truncated_attempts_out_of_the_comparison(method: str) -> None:
    attempts = [*group(*[RIGHT] * 3, *[WRONG] * 2).trajectories]
    attempts[4] = replace(attempts[4], stop=Stop.MAX_TOKENS)
    cut = Group(problem=group().problem, trajectories=tuple(attempts))
    chosen = named(method, drop_truncated=True)(cut, random.Random(1))
    assert [choice.reason for choice in chosen.choices][4] is Reason.DROPPED_TRUNCATED
    assert sum(choice.kept for choice in chosen.choices) == 4


@pytest.mark.parametrize("method", METHODS)
def test_attempts_with_a_void_turn_are_left_out_of_the_comparison(method: str) -> None:
    attempts = [*group(*[RIGHT] * 3, *[WRONG] * 2).trajectories]
    attempts[4] = replace(attempts[4], turns=attempts[4].turns * 2)  # the first turn has no call
    void = Group(problem=group().problem, trajectories=tuple(attempts))
    assert sum(choice.kept for choice in named(method)(void, random.Random(1)).choices) >= 4
    chosen = named(method, drop_void_turns=True)(void, random.Random(1))
    assert [choice.reason for choice in chosen.choices][4] is Reason.DROPPED_VOID_TURN
    assert sum(choice.kept for choice in chosen.choices) == 4


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("1 / 0", "failed on its settings: ZeroDivisionError: division by zero (plug_resampler.py, line 1)"),
        ("5", "made 5 of the settings"),
        ("lambda group, rng: 1 / 0", "failed on a group of 5 attempts: ZeroDivisionError: division by zero (plug_re"),
        ("lambda group, rng: None", "made NoneType of a group; let it return Resampled(group"),
        ("lambda group, rng: []", "made list of a group; let it return Resampled(group"),
    ],
)
def test_a_resampler_that_is_none_is_refused_before_a_run(modules: Path, made: str, said: str) -> None:
    (modules / "plug_resampler.py").write_text(f"def resampler(settings): return {made}")
    with pytest.raises(ConfigError) as refused:
        resampler_of(ResampleSection(method="plug_resampler:resampler"), [modules])
    message = str(refused.value)
    assert message.startswith("resample.method = 'plug_resampler:resampler'") and said in message


CODE = """
from dataclasses import replace
from fractions import Fraction
from random import Random
from rocstar.learning.resample import resample, resampled
from rocstar.config.sections import ResampleSection
from rocstar.types import Penalty, Reason

def each(group, **change):
    result = resample(group, Random(0), ResampleSection(method="all"))
    return replace(result, choices=tuple(replace(choice, **change) for choice in result.choices))

def resampler(settings):
    return lambda group, rng: MADE
"""


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("each(group, kept=1)", "kept=1, reason=<Reason.KEPT_ALL"),
        ("each(group, reason='kept.mine')", "reason='kept.mine'"),
        ("each(group, kept=False)", "kept=False, reason=<Reason.KEPT_ALL"),
        ("each(group, penalty=0.5)", "penalty=0.5"),
        ("each(group, penalty=Penalty(errors=float('nan'), format=0.0))", "errors=nan"),
        ("each(group, weight=float('nan'))", "weight=nan"),
        ("each(group, weight=-1.0)", "weight=-1.0"),
        ("each(group, weight=Fraction(1, 3))", "weight=Fraction(1, 3)"),
        ("each(group, kept=True, reason=Reason.KEPT_ALL)", "keep no attempt without a verdict"),
        ("replace(each(group), choices=each(group).choices[1:])", "made 4 choices of 5 attempts"),
        ("each(group, index=0)", "index=0"),
        ("each(group)", "made 33 choices of 33 attempts and kept 32; make one for each, in order, and keep at most"),
        ("replace(each(group), choices=(one for one in each(group).choices))", "made Resampled of a group"),
        ("replace(each(group), group=replace(group, trajectories=()))", "let it return Resampled(group=group"),
        ("each(replace(group, trajectories=group.trajectories[::-1]))", "let it return Resampled(group=group"),
        ("[attempt.outcome.reward for attempt in group.trajectories]", "'NoneType' object has no attribute 'reward'"),
        ("resampled(group, rng, lambda *_: [(Reason.KEPT_ALL, 1.0)], settings)", "chose 1 fates for 4 attempts"),
    ],
)
def test_choices_that_a_step_could_not_use_are_refused_before_a_run(modules: Path, made: str, said: str) -> None:
    (modules / "plug_resampler.py").write_text(CODE.replace("MADE", made))
    with pytest.raises(ConfigError) as refused:
        resampler_of(ResampleSection(method="plug_resampler:resampler"), [modules])
    message = str(refused.value)
    assert message.startswith("resample.method = 'plug_resampler:resampler'") and said in message
