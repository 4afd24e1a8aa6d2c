"""What a step says of itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torch")

from rocstar.config.sections import LearningSection, Recipe, RlStage, StageRolloutSection
from rocstar.errors import ContractBroken
from rocstar.learning.advantages import advantages, rows_of
from rocstar.run.report import (
    attempt_records,
    faults_of,
    mean_of_updates,
    means_of_parts,
    staleness_metrics,
    step_metrics,
)
from rocstar.types import Completion, Finish, Group, Reason, Resampled, Turn, Update, Verdict, VersionSpan
from tests.record.examples import PROBLEM, choice, resampled, trajectory


def with_losses() -> Resampled:
    """One right, one wrong, one fault of ours and one undecided."""
    verdicts = (Verdict.RIGHT, Verdict.WRONG, None, Verdict.UNDECIDED)
    made = [trajectory(n, verdict=verdict) for n, verdict in enumerate(verdicts)]
    attempts = tuple(replace(t, outcome=t.outcome and replace(t.outcome, parts={"form@/": t.index})) for t in made)
    choices = (
        choice(0, True, Reason.KEPT_ALL),
        choice(1, True, Reason.KEPT_ALL),
        choice(2, False, Reason.DROPPED_ENVIRONMENT),
        choice(3, False, Reason.DROPPED_UNDECIDED),
    )
    return Resampled(group=Group(problem=PROBLEM, trajectories=attempts), choices=choices)


def scored(groups: list[Resampled], normalize_by_std: bool = True) -> tuple:  # type: ignore[type-arg]
    return tuple(
        replace(row, old_logprobs=row.sampled_logprobs, entropies=[0.5 if mine else 9.0 for mine in row.loss_mask])
        for row in rows_of(groups, partial(advantages, normalize_by_std=normalize_by_std))
    )


def test_a_step_tells_the_mean_of_its_updates_and_how_many_there_were() -> None:
    found = ({"loss": 1.0, "grad_norm": 4.0}, {"loss": 3.0, "grad_norm": 2.0})
    assert mean_of_updates([Update(metrics=metrics, rows=()) for metrics in found]) == {
        "learn/updates": 2.0,
        "learn/loss": 2.0,
        "learn/grad_norm": 3.0,
    }
    assert mean_of_updates([]) == {"learn/updates": 0.0}


def test_every_drop_has_its_own_counter() -> None:
    groups = [with_losses(), resampled()]
    metrics = step_metrics(groups, scored(groups))
    dropped = {name: count for name, count in metrics.items() if name.startswith("drop/") and count}
    assert dropped == {"drop/environment_failed": 1, "drop/undecided": 1, "drop/quality": 1}
    assert metrics["roc/attempts"] == metrics["roc/kept"] + sum(dropped.values()) == 7
    assert (metrics["group/usable"], metrics["policy/entropy"]) == (2, 0.5)
    alone = step_metrics(groups[:1], scored(groups[:1]))  # faults and undecided attempts count in no accuracy
    assert (alone["reward/mean"], alone["verdict/undecided"], alone["reward/parts/form__"]) == (0.5, 0.25, 0.5)
    assert faults_of([one.group for one in groups[:1]]) == (0.5, "the sandbox is gone")


def test_parts_are_averaged_as_rewards_are_over_the_attempts_that_have_them() -> None:
    found = means_of_parts(
        [[{"form": 1.0}, {"form": 0.0}, {}], [{"form": 0.25, "": 2.0, "a b": 1.0, "a.b": 3.0, "a!b": 4.0}], []]
    )
    means = {name.removeprefix("reward/parts/"): mean for name, mean in found.items()}
    assert means == {"_": 2.0, "form": 0.375, "a_b": 1.0, "a_b_": 4.0, "a_b__": 3.0}


def written_by(*spans: tuple[int, int]) -> Group:
    """A group of one attempt at each span (policy version, tokens), and one of tokens that nobody stamped."""
    completions = [
        Completion(
            token_ids=(1,) * tokens,
            logprobs=(-1.0,) * tokens,
            finish=Finish.STOP,
            version_spans=(VersionSpan(version, tokens),),
        )
        for version, tokens in spans
    ]
    completions.append(Completion(token_ids=(1,), logprobs=(-1.0,), finish=Finish.STOP))
    attempts = (replace(trajectory(0), turns=(Turn(completion=completion),)) for completion in completions)
    return Group(problem=PROBLEM, trajectories=tuple(attempts))


def stage(steps: int, updates: int) -> RlStage:
    sections = Recipe()
    return RlStage(
        name="s",
        kind="rl",
        steps=9,
        data=sections.data,
        rollout=StageRolloutSection(max_staleness_steps=steps),
        resample=sections.resample,
        learning=LearningSection(updates_per_step=updates),
        end=sections.end,
    )


def test_staleness_is_told_over_tokens_in_updates_and_their_shares_in_steps() -> None:
    # Learnt from by version 10, two updates a step: ages 0, 1, 2 and 4 of 10, 20, 30 and 40 tokens; mean 2.4.
    group = written_by((10, 10), (9, 20), (8, 30), (6, 40))
    assert staleness_metrics([group], 10, stage(2, 2), 1.5) == {
        "staleness/mean": pytest.approx(2.4),
        "staleness/max": 4,
        "staleness/share_0": pytest.approx(0.1),
        "staleness/share_1": pytest.approx(0.5),
        "staleness/share_2": pytest.approx(0.4),
        "step/overlap_seconds": 1.5,
    }


def test_a_token_past_the_bound_is_a_bug_that_ends_the_run_and_a_strict_stage_tells_nothing() -> None:
    with pytest.raises(ContractBroken, match="a token is 5 updates older than what learns from it, 4 allowed"):
        staleness_metrics([written_by((5, 1))], 10, stage(2, 2), 0.0)
    assert staleness_metrics([written_by((10, 1))], 10, stage(0, 2), 0.0) == {}


def test_the_gap_between_engine_and_learner_is_told_of_fresh_and_of_stale_tokens_alone() -> None:
    """An attempt of four tokens by version 4 and one of which two are by version 3 and two by version 4."""
    group, spans = written_by((4, 4), (3, 4)), ((VersionSpan(4, 4),), (VersionSpan(3, 2), VersionSpan(4, 2)))
    verdicts = (Verdict.RIGHT, Verdict.WRONG)
    attempts = tuple(
        replace(
            attempt,
            index=place,
            outcome=trajectory(place, verdict=verdict).outcome,
            turns=(Turn(completion=replace(attempt.turns[0].completion, version_spans=of)),),
        )
        for place, (attempt, verdict, of) in enumerate(zip(group.trajectories[:2], verdicts, spans, strict=True))
    )
    kept = tuple(choice(place, True, Reason.KEPT_ALL) for place in range(2))
    groups = [Resampled(group=replace(group, trajectories=attempts), choices=kept)]
    rows = []
    for row, gaps in zip(rows_of(groups, advantages), ((0.1,) * 4, (0.5, 0.5, 0.3, 0.3)), strict=True):
        left, old = iter(gaps), row.sampled_logprobs
        off = [value + (next(left) if mine else 9.0) for value, mine in zip(old, row.loss_mask, strict=True)]
        rows.append(replace(row, old_logprobs=off, entropies=[0.5] * len(row.token_ids)))

    assert step_metrics(groups, rows, 4)["policy/logprob_gap_max"] == pytest.approx(0.3)

    def gaps_by(version: int | None) -> tuple[float | None, float | None]:
        metrics = step_metrics(groups, rows, version)
        return metrics.get("policy/logprob_gap"), metrics.get("staleness/logprob_gap")

    assert gaps_by(4) == (pytest.approx(1 / 6), pytest.approx(0.5))  # four of 0.1 and two of 0.3; two of 0.5
    assert gaps_by(None) == (pytest.approx(0.25), None)
    assert gaps_by(5) == (None, pytest.approx(0.25))


def test_an_undecided_attempt_uses_up_the_fault_budget_and_names_its_reference() -> None:
    attempts = tuple(trajectory(n, verdict=verdict) for n, verdict in enumerate((Verdict.RIGHT, Verdict.UNDECIDED)))
    share, first = faults_of([Group(problem=PROBLEM, trajectories=attempts)])
    assert share == 0.5 and first is not None
    assert f"could not decide problem {PROBLEM.id} (" in first and f"reference {PROBLEM.answer!r}" in first
    (own,) = (t for t in attempts if t.outcome and t.outcome.verdict is Verdict.UNDECIDED)
    assert own.outcome
    own = replace(own, outcome=replace(own.outcome, method="function"))
    told = faults_of([Group(problem=PROBLEM, trajectories=(own,))])[1]
    assert told == f"your reward function gave None, which is no reward, to an attempt at problem {PROBLEM.id}"


def test_graded_rewards_have_a_mean_and_right_attempts_are_those_that_the_verifier_called_right() -> None:
    graded = tuple(
        replace(attempt, outcome=replace(attempt.outcome, reward=reward))
        for attempt, reward in zip(resampled().group.trajectories, (0.25, 0.5, 1.0), strict=True)
        if attempt.outcome
    )
    group = replace(resampled(), group=replace(resampled().group, trajectories=graded))
    metrics = step_metrics([group], scored([group]))
    assert metrics["reward/mean"] == pytest.approx(1.75 / 3)
    right = [attempt.outcome for attempt in graded if attempt.outcome and attempt.outcome.verdict is Verdict.RIGHT]
    assert metrics["verdict/right"] == pytest.approx(len(right) / 3)


def test_the_penalty_of_right_attempts_is_told_before_and_after_the_choice() -> None:
    metrics = step_metrics([resampled()], scored([resampled()]))
    assert metrics["roc/penalty_right"] == pytest.approx((1.5 + 0.5) / 2)
    assert metrics["roc/penalty_right_kept"] == pytest.approx(0.5)
    assert metrics["roc/penalty_right_dropped"] == pytest.approx(1.5)


def test_a_step_that_kept_nothing_still_reports() -> None:
    attempts = tuple(trajectory(n, verdict=Verdict.WRONG) for n in range(2))
    choices = tuple(choice(n, False, Reason.DROPPED_EQUAL_REWARDS) for n in range(2))
    group = Resampled(group=Group(problem=PROBLEM, trajectories=attempts), choices=choices)
    metrics = step_metrics([group], ())
    assert metrics["drop/equal_rewards"] == 2 and metrics["roc/kept"] == 0
    assert "policy/entropy" not in metrics


def test_every_attempt_is_recorded_and_kept_ones_with_their_advantage() -> None:
    groups = [resampled()]
    records = attempt_records(groups, scored(groups, normalize_by_std=False), policy_version=9)
    assert [record.trajectory.index for record in records] == [0, 1, 2]
    assert [record.advantage for record in records] == [None, -0.5, 0.5]
    assert [record.entropies is None for record in records] == [True, False, False]
    assert {record.policy_version for record in records} == {9}
