"""From resampled groups to rows: advantages by hand and by property, who gets which, and which tokens count."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import advantage_of, advantages, kept_advantages, rows_of, top_entropy
from rocstar.types import BatchRow, Choice, Group, Penalty, Reason, Resampled, Verdict
from tests.record.examples import PROBLEM, resampled, trajectory

DIFFERENCES = partial(advantages, normalize_by_std=False)


def test_one_success_in_four_by_hand() -> None:
    # mean 1/4; squares 9/16 + 3 * 1/16 = 12/16; over 3: 1/4; deviation 1/2
    assert advantages((1.0, 0.0, 0.0, 0.0)) == pytest.approx((1.5, -0.5, -0.5, -0.5), abs=1e-5)
    assert advantages((1.0, 0.0, 0.0, 0.0), normalize_by_std=False) == (0.75, -0.25, -0.25, -0.25)
    assert advantages((0.1,) * 3) == (0.0,) * 3, "though the mean of these floats is not 0.1"


@pytest.mark.parametrize("rewards", [(), (1.0,)])
def test_fewer_than_two_siblings_are_refused(rewards: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least two siblings"):
        advantages(rewards)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=32))
def test_advantages_sum_to_zero_order_like_rewards_and_have_unit_unbiased_variance(rewards: list[float]) -> None:
    result = advantages(rewards)
    assert sum(result) == pytest.approx(0.0, abs=1e-9)
    for reward, advantage in zip(rewards, result, strict=True):
        assert advantage == 0.0 if len(set(rewards)) == 1 else (advantage > 0) == (reward > 0)
    if len(set(rewards)) == 2:
        assert sum(value * value for value in result) / (len(result) - 1) == pytest.approx(1.0, abs=1e-4)


def chosen(kept: list[bool], rights: list[bool]) -> Resampled:
    attempts = [trajectory(n, verdict=Verdict.RIGHT if right else Verdict.WRONG) for n, right in enumerate(rights)]
    choices = [
        Choice(index=n, kept=keep, reason=Reason.KEPT_ALL, penalty=Penalty(errors=0, format=0))
        for n, keep in enumerate(kept)
    ]
    return Resampled(group=Group(problem=PROBLEM, trajectories=tuple(attempts)), choices=tuple(choices))


def test_advantages_are_taken_over_the_kept_siblings_only() -> None:
    group = chosen([True, False, True, True, True], [True, True, False, False, False])
    assert kept_advantages(group, DIFFERENCES) == pytest.approx({0: 0.75, 2: -0.25, 3: -0.25, 4: -0.25})


def test_fewer_than_two_kept_siblings_teach_nothing() -> None:
    assert kept_advantages(chosen([True, False], [True, False]), advantages) == {}
    assert rows_of([chosen([False, False], [True, False])], advantages) == ()


def test_a_row_holds_the_whole_trajectory_and_learns_what_the_policy_wrote() -> None:
    rows = rows_of([resampled()], DIFFERENCES)
    assert [row.origin for row in rows] == [(0, 1, 0), (0, 2, 0)]
    assert list(rows[0].token_ids) == [1, 2, 11, 12, 7, 8, 9, 13]
    assert list(rows[0].loss_mask) == [False, False, True, True, False, False, False, True]
    assert list(rows[0].sampled_logprobs) == [0, 0, -0.5, -0.25, 0, 0, 0, -1.0]
    assert [row.advantage for row in rows] == [-0.5, 0.5]


def test_advantages_over_the_batch_are_divided_by_the_deviation_of_all_kept_rewards() -> None:
    """Kept are 1, 0, 0, 0 and 1, 1, 0 of two groups, whose deviation is that of three ones and four zeros."""
    groups = [chosen([True] * 4 + [False], [True, False, False, False, True]), chosen([True] * 3, [True, True, False])]
    settings = LearningSection(normalize_by_std="batch")
    rows = rows_of(groups, advantage_of(settings), over_batch=True)
    deviation = (3 * (4 / 7) ** 2 + 4 * (3 / 7) ** 2) / 6
    expected = [0.75, -0.25, -0.25, -0.25, 1 / 3, 1 / 3, -2 / 3]
    assert [row.advantage * deviation**0.5 for row in rows] == pytest.approx(expected, rel=1e-5)
    assert rows_of([], advantage_of(settings), over_batch=True) == ()
    with pytest.raises(ValueError, match="is for learning"):
        LearningSection(normalize_by_std="batch", advantage="rloo")


def test_loss_on_top_entropy_is_on_that_share_of_each_rows_own_tokens() -> None:
    row = BatchRow(
        token_ids=(1, 2, 3, 4, 5, 6),
        loss_mask=(False, True, True, False, True, True),
        sampled_logprobs=(0.0,) * 6,
        advantage=1.0,
        entropies=(9.0, 0.1, 0.4, 9.0, 0.3, 0.2),
    )
    half, least = (top_entropy((row,), share) for share in (0.5, 0.01))
    assert half[0].loss_mask == (False, False, True, False, True, False)
    assert sum(least[0].loss_mask) == 1
    assert top_entropy((row,), 1.0)[0].loss_mask == row.loss_mask
