"""What each resampler keeps: a group of eight by hand, the released quota table, and the law of the weighted draw."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.config.sections import ResampleSection
from rocstar.learning.resample import METHODS, _fates, negatives_kept, release_quotas, seed_of_choice, select
from rocstar.types import Reason

# A group of eight, kept 2G = 8 -> G = 4:  four successes, four failures.
REWARDS = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0)
PENALTIES = (1.5, 0.0, 0.0, 2.0, 0.5, 1.0, 0.0, 0.5)


def test_a_group_of_eight_keeps_two_of_each_class() -> None:
    kept, reasons = select(REWARDS, PENALTIES, 4, random.Random(0))
    assert Counter(reasons) == {
        Reason.KEPT_QUALITY: 2,
        Reason.DROPPED_QUALITY: 2,
        Reason.KEPT_NEGATIVE: 2,
        Reason.DROPPED_NEGATIVE: 2,
    }
    assert kept == tuple(i for i in range(8) if reasons[i] in (Reason.KEPT_QUALITY, Reason.KEPT_NEGATIVE))
    assert all((reasons[i] in (Reason.KEPT_QUALITY, Reason.DROPPED_QUALITY)) == (REWARDS[i] > 0) for i in range(8))


def test_the_two_flawless_successes_win_the_draw_as_often_as_their_weights_say() -> None:
    # Weights of successes 0, 2, 4, 6 are 1/1.51, 1/.01, 1/.51, 1/.01 = .6623, 100, 1.961, 100; their sum 202.62.
    # Both flawless ones: 2 * (100 / 202.62) * (100 / 102.62) = .9619.
    draws = [select(REWARDS, PENALTIES, 4, random.Random(seed))[0] for seed in range(1000)]
    both = sum({2, 6} <= set(kept) for kept in draws) / len(draws)
    assert both == pytest.approx(0.9619, abs=0.024)  # four standard errors


def test_each_run_step_and_problem_draws_anew() -> None:
    assert len({seed_of_choice(*each) for each in ((1, 1, "p"), (2, 1, "p"), (1, 2, "p"), (1, 1, "q"))}) == 4


def test_failures_are_drawn_without_looking_at_their_penalty() -> None:
    counts: Counter[int] = Counter()
    for seed in range(1000):
        counts.update(index for index in select(REWARDS, PENALTIES, 4, random.Random(seed))[0] if index % 2)
    assert all(counts[index] / 1000 == pytest.approx(0.5, abs=0.064) for index in (1, 3, 5, 7))


def test_graded_rewards_have_successes_above_a_threshold() -> None:
    """Half of the credit is no success unless the caller says so; failures are then drawn blindly."""
    rewards, penalties = (0.5, 0.75, 1.0, 0.5, 0.9, -1.0), (0.0, 2.0, 0.0, 2.0, 0.0, 0.0)
    for above, successes in ((0.5, {1, 2, 4}), (0.0, {0, 1, 2, 3, 4}), (0.8, {2, 4})):
        _, reasons = select(rewards, penalties, 4, random.Random(0), success_above=above)
        assert {i for i, reason in enumerate(reasons) if "quality" in reason} == successes
    assert select(rewards, penalties, 4, random.Random(0)) == select(
        rewards, penalties, 4, random.Random(0), success_above=0.5
    )


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=20), st.integers())
def test_what_is_kept_of_graded_rewards_is_never_without_signal(rewards: list[float], seed: int) -> None:
    kept, reasons = select(rewards, [0.0] * len(rewards), 3, random.Random(seed))
    assert len({rewards[index] for index in kept}) != 1
    assert kept or set(reasons) == {Reason.DROPPED_EQUAL_REWARDS}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 1, 1, 8, 8, 15, 16]),  # half, rounded down, but never none
        ({"failure_floor": 0}, [0, 0, 1, 1, 8, 8, 15, 16]),  # the paper's
        ({"failure_floor": 3}, [0, 1, 2, 3, 8, 8, 15, 16]),
    ],
)
def test_half_the_negatives_are_kept_but_not_fewer_than_the_floor(settings: dict[str, int], kept: list[int]) -> None:
    section = ResampleSection(**settings)  # type: ignore[arg-type]
    assert [negatives_kept(negatives, 32, section) for negatives in (0, 1, 2, 3, 16, 17, 31, 32)] == kept


def test_one_failure_of_many_teaches_nothing_without_the_floor() -> None:
    rewards = [True] * 7 + [False]
    choose = partial(METHODS["roc"], settings=ResampleSection(keep=4, failure_floor=0))
    fates = _fates([float(right) for right in rewards], rewards, [0.0] * 8, random.Random(0), choose)
    assert {reason for reason, _ in fates} == {Reason.DROPPED_EQUAL_REWARDS}
    with pytest.raises(ValueError, match=r"failure_floor 4 leaves no right attempt in resample\.keep 4"):
        ResampleSection(keep=4, failure_floor=4)
    with pytest.raises(ValueError, match=r"do not fit into resample\.keep 4"):
        ResampleSection(method="roc_release", keep=4, min_positive=3, min_negative=2)


def test_the_release_quotas_match_its_table_for_32_to_16() -> None:
    table = [0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 9, 10, 10, 10, 11, 12, 12, 12, 13, 14, 14, 14]
    table += [14, 15, 16]
    assert [release_quotas(positives, 32 - positives, ResampleSection())[0] for positives in range(33)] == table
    for keep in (7, 15):  # odd groups that trip the release are kept whole here
        assert sum(release_quotas(keep, keep, ResampleSection(keep=keep))) == keep


@given(st.integers(2, 20), st.integers(0, 10), st.integers(0, 10), st.integers(0, 40), st.integers(0, 40))
def test_the_release_quotas_fit_the_group_for_every_size(
    keep: int, min_positive: int, min_negative: int, positives: int, negatives: int
) -> None:
    if min_positive + min_negative > keep or positives + negatives <= keep:
        return
    settings = ResampleSection(method="roc_release", keep=keep, min_positive=min_positive, min_negative=min_negative)
    kept_positives, kept_negatives = release_quotas(positives, negatives, settings)
    assert kept_positives + kept_negatives == keep
    assert min(min_positive, positives) <= kept_positives <= positives
    assert min(min_negative, negatives) <= kept_negatives <= negatives


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("rewards", "penalties", "keep", "told"),
    [
        ((1.0, 0.0), (0.0,), 2, "must pair up"),
        ((1.0, 0.0), (0.0, 0.0), 1, "at least 2"),
        ((1.0, 0.0), (0.0, 0.0), 2.5, "at least 2"),
        # Also where nothing is drawn:
        *(((NAN, 0.0, 1.0), (0.0, 0.0, 0.0), keep, "attempt 0 has reward nan") for keep in (2, 8)),
        *(
            ((1.0, 0.0, 1.0), (0.0, wrong, 0.0), keep, f"attempt 1 has reward 0.0 and penalty {wrong}; give finite num")
            for wrong in (NAN, INFINITE, -0.1)
            for keep in (2, 8)
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    rewards: tuple[float, ...], penalties: tuple[float, ...], keep: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        select(rewards, penalties, keep, random.Random(0))
