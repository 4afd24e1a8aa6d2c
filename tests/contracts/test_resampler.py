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
from rocstar.learning.resample import METHODS, resampler_of
from rocstar.protocols import Resampler
from rocstar.types import Group, Problem, Reason, Status, Stop, Trajectory, Verdict
from tests.contracts.own import own, refusal
from tests.learning.test_quality import attempt, turn

KEEP = 4


def named(method: str, **more: Any) -> Resampler:
    return resampler_of(ResampleSection.model_validate({"method": method, "keep": KEEP, **more}))


RESAMPLERS: dict[str, Resampler] = {
    **{name: named(name) for name in [*METHODS, *own("resample.method", "Balanced")]},
    "roc_release, lower minima": named("roc_release", min_positive=1, min_negative=1),
    "roc, what the paper tried": named("roc", repetition_weight=1.0, drop_truncated=True),
}
every_resampler = pytest.mark.parametrize("name", RESAMPLERS)

Kind = tuple[str, int, int]
"""(verdict or "fault", failed calls, calls)."""
KINDS = st.tuples(st.sampled_from(["right", "wrong", "undecided", "fault"]), st.integers(0, 2), st.integers(2, 3))


def trajectory(index: int, kind: Kind) -> Trajectory:
    name, failed, calls = kind
    made = replace(attempt(turn(*[Status.CODE_ERROR] * failed, *[Status.OK] * (calls - failed))), index=index)
    if name == "fault":
        return replace(made, stop=Stop.ENVIRONMENT_FAILED, outcome=None, fault="sandbox is down")
    assert made.outcome
    return replace(made, outcome=replace(made.outcome, verdict=Verdict(name), reward=float(name == "right")))


def group(*kinds: Kind) -> Group:
    return Group(
        problem=Problem(id="p", question="?", answer="1"),
        trajectories=tuple(trajectory(index, kind) for index, kind in enumerate(kinds)),
    )


RIGHT, WRONG, UNDECIDED, FAULT = ("right", 0, 2), ("wrong", 0, 2), ("undecided", 0, 2), ("fault", 0, 2)


@every_resampler
@given(kinds=st.lists(KINDS, max_size=16), seed=st.integers())
def test_what_is_kept_has_a_signal_and_the_right_size(name: str, kinds: list[Kind], seed: int) -> None:
    resampler, siblings = RESAMPLERS[name], group(*kinds)
    result = resampler(siblings, random.Random(seed))
    assert result == resampler(siblings, random.Random(seed)), "it follows from the seed"
    assert result.group is siblings
    assert [choice.index for choice in result.choices] == list(range(len(kinds)))
    assert all(choice.kept == choice.reason.value.startswith("kept.") for choice in result.choices)
    assert len(result.kept) + len(result.dropped) == len(kinds)
    assert all(kept.outcome and kept.outcome.verdict is not Verdict.UNDECIDED for kept in result.kept)
    assert not result.kept or {kept.outcome.reward for kept in result.kept if kept.outcome} == {0.0, 1.0}
    usable = [verdict for verdict, _, _ in kinds if verdict in ("right", "wrong")]
    size = len(usable) if name == "all" else min(len(usable), KEEP)
    if ":" in name:  # one of the user's own may keep fewer
        assert len(result.kept) <= KEEP
    elif name == "uniform":  # a blind draw may lose a class, and drops the group then
        assert len(result.kept) in (0, size)
    else:
        assert len(result.kept) == (size if len(set(usable)) == 2 else 0)


@every_resampler
def test_every_kind_of_loss_has_its_own_reason(name: str) -> None:
    resampler = RESAMPLERS[name]
    reasons = [choice.reason for choice in resampler(group(RIGHT, UNDECIDED, FAULT), random.Random(0)).choices]
    assert reasons == [Reason.DROPPED_TOO_FEW, Reason.DROPPED_UNDECIDED, Reason.DROPPED_ENVIRONMENT]
    for kind in (RIGHT, WRONG):
        choices = resampler(group(*[kind] * 6), random.Random(0)).choices
        assert {choice.reason for choice in choices} == {Reason.DROPPED_EQUAL_REWARDS}
    if ":" not in name:
        choices = resampler(group(RIGHT, WRONG, FAULT, WRONG), random.Random(0)).choices
        assert [choice.reason is Reason.KEPT_ALL for choice in choices] == [True, True, False, True], "a short group"


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
def test_truncated_attempts_and_those_with_a_void_turn_are_left_out_where_that_is_asked_for(method: str) -> None:
    attempts = group(*[RIGHT] * 3, *[WRONG] * 2).trajectories
    for setting, changes, reason in (
        ("drop_truncated", {"stop": Stop.MAX_TOKENS}, Reason.DROPPED_TRUNCATED),
        ("drop_void_turns", {"turns": (turn(), *attempts[4].turns)}, Reason.DROPPED_VOID_TURN),
    ):
        last = replace(attempts[4], **changes)  # type: ignore[arg-type]
        siblings = Group(problem=group().problem, trajectories=(*attempts[:4], last))
        assert sum(choice.kept for choice in named(method)(siblings, random.Random(1)).choices) >= 4
        choices = named(method, **{setting: True})(siblings, random.Random(1)).choices
        assert choices[4].reason is reason and sum(choice.kept for choice in choices) == 4


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

def own(settings):
    return lambda group, rng: MADE
"""


def assert_refused(modules: Path, code: str, said: str) -> None:
    """Before a run."""
    assert said in refusal(
        modules, "resample.method", code, lambda name: resampler_of(ResampleSection(method=name), [modules])
    )


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("1 / 0", "failed on its settings: ZeroDivisionError: division by zero (plug.py, line 1)"),
        ("5", "returned 5 for the settings"),
    ],
)
def test_settings_that_make_no_resampler_are_refused(modules: Path, made: str, said: str) -> None:
    assert_refused(modules, f"def own(settings): return {made}", said)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("1 / 0", "failed on a group of 5 attempts: ZeroDivisionError: division by zero (plug"),
        ("[]", "returned list; return Resampled(group"),
        ("each(group, kept=1)", "kept=1, reason=<Reason.KEPT_ALL"),
        ("each(group, reason='kept.mine')", "reason='kept.mine'"),
        ("each(group, kept=False)", "kept=False, reason=<Reason.KEPT_ALL"),
        ("each(group, penalty=0.5)", "penalty=0.5"),
        ("each(group, penalty=Penalty(errors=float('nan'), format=0.0))", "errors=nan"),
        ("each(group, weight=float('nan'))", "weight=nan"),
        ("each(group, weight=-1.0)", "weight=-1.0"),
        ("each(group, weight=Fraction(1, 3))", "weight=Fraction(1, 3)"),
        ("each(group, kept=True, reason=Reason.KEPT_ALL)", "keep no attempt without a verdict"),
        ("replace(each(group), choices=each(group).choices[1:])", "returned 4 choices for 5 attempts"),
        ("each(group, index=0)", "index=0"),
        ("each(group)", "returned 33 choices for 33 attempts and kept 32; return one for each, in order"),
        ("replace(each(group), choices=(one for one in each(group).choices))", "returned Resampled; return"),
        ("replace(each(group), group=replace(group, trajectories=()))", "return Resampled(group=group"),
        ("each(replace(group, trajectories=group.trajectories[::-1]))", "return Resampled(group=group"),
        ("[attempt.outcome.reward for attempt in group.trajectories]", "'NoneType' object has no attribute 'reward'"),
        ("resampled(group, rng, lambda *_: [(Reason.KEPT_ALL, 1.0)], settings)", "chose 1 fates for 4 attempts"),
    ],
)
def test_choices_that_a_step_could_not_use_are_refused(modules: Path, made: str, said: str) -> None:
    assert_refused(modules, CODE.replace("MADE", made), said)
