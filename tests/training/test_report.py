"""What a step says of itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from rocstar.learning.batches import rows_of
from rocstar.training.report import attempt_records, faults_of, mean_of_updates, step_metrics
from rocstar.types import Group, Reason, Resampled, Verdict
from tests.runs.examples import PROBLEM, choice, resampled, trajectory


def with_losses() -> Resampled:
    """One right, one wrong, one fault of ours and one undecided."""
    verdicts = (Verdict.RIGHT, Verdict.WRONG, None, Verdict.UNDECIDED)
    attempts = tuple(trajectory(n, verdict=verdict) for n, verdict in enumerate(verdicts))
    choices = (
        choice(0, True, Reason.KEPT_ALL),
        choice(1, True, Reason.KEPT_ALL),
        choice(2, False, Reason.DROPPED_ENVIRONMENT),
        choice(3, False, Reason.DROPPED_UNDECIDED),
    )
    return Resampled(group=Group(problem=PROBLEM, trajectories=attempts), choices=choices)


def scored(groups: list[Resampled]) -> tuple:  # type: ignore[type-arg]
    from dataclasses import replace

    return tuple(
        replace(row, old_logprobs=row.sampled_logprobs, entropies=[0.5] * len(row.token_ids))
        for row in rows_of(groups, True)
    )


def test_a_step_tells_the_mean_of_its_updates_and_how_many_there_were() -> None:
    assert mean_of_updates([{"loss": 1.0, "grad_norm": 4.0}, {"loss": 3.0, "grad_norm": 2.0}]) == {
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
    assert metrics["group/usable"] == 2


def test_faults_and_undecided_attempts_count_in_no_accuracy() -> None:
    groups = [with_losses()]
    assert step_metrics(groups, scored(groups))["reward/mean"] == 0.5
    assert faults_of(groups) == (0.25, "the sandbox is gone")


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
    records = attempt_records(groups, scored(groups), normalize_by_std=False, policy_version=9)
    assert [record.trajectory.index for record in records] == [0, 1, 2]
    assert [record.advantage for record in records] == [None, -0.5, 0.5]
    assert [record.entropies is None for record in records] == [True, False, False]
    assert {record.policy_version for record in records} == {9}
