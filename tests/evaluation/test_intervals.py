"""Quantiles against published tables, intervals by hand and at their edges, and how often they hold the truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.evaluation.intervals import Z, beta_quantile, mean_difference, mean_over_problems, student, wilson

EVALUATIONS = 100
MISSES = 3 * sqrt(0.95 * 0.05 / EVALUATIONS)  # three standard errors of a share of 95%


@pytest.mark.parametrize(("freedom", "point"), [(1, 12.7062), (4, 2.7764), (29, 2.0452), (120, 1.9799), (1e6, 1.95997)])
def test_student_points_are_those_of_tables(freedom: float, point: float) -> None:
    assert student(freedom) == pytest.approx(point, abs=5e-5)


@pytest.mark.parametrize(
    ("chance", "a", "b", "point"),
    # Jeffreys' 95% limits for 0 of 10 and 5 of 10 (Brown, Cai and DasGupta 2001), a median, a uniform law
    [(0.975, 0.5, 10.5, 0.2172), (0.025, 5.5, 5.5, 0.2235), (0.5, 3.0, 3.0, 0.5), (0.3, 1.0, 1.0, 0.3)],
)
def test_beta_points_are_those_of_tables(chance: float, a: float, b: float, point: float) -> None:
    assert beta_quantile(chance, a, b) == pytest.approx(point, abs=5e-5)
    with pytest.raises(ValueError, match="positive"):
        beta_quantile(chance, 0.0, b)


def test_a_mean_by_hand() -> None:
    # 3/4, 3/4, 1/4, 1/4 with half a 0 and half a 1: mean 1/2, square (1.25 + 0.5) / 5 = 0.35, variance 0.1, so that
    # a + b = 0.25 * 6 / 0.1 - 1 = 14; Wilson at 4 * 0.25 / (0.25 / 3) = 12 is [0.254, 0.746], and narrower
    estimate = mean_over_problems([0.75, 0.75, 0.25, 0.25])
    expected = 0.5, beta_quantile(0.025, 7.0, 7.0), beta_quantile(0.975, 7.0, 7.0)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(expected)
    assert estimate.low < wilson(6.0, 12.0).low and estimate.n == 4


@settings(max_examples=25)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_an_interval_is_never_narrower_than_wilson_at_the_effective_size(right: list[int]) -> None:
    values = [count / 8 for count in right]
    n, mean = len(values), sum(values) / len(values)
    variance = sum((x - mean) ** 2 for x in values) / max(1, n - 1)
    size = n * max(1.0, mean * (1 - mean) / variance) if variance else float(n)
    estimate, least = mean_over_problems(values), wilson(min(size, mean * size), size)
    assert estimate.low <= least.low + 1e-9 and estimate.high >= least.high - 1e-9
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0


@settings(max_examples=25)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30))
def test_right_and_wrong_are_treated_alike(right: list[int]) -> None:
    one, other = mean_over_problems([c / 8 for c in right]), mean_over_problems([1 - c / 8 for c in right])
    assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low), abs=1e-9)


def mastered(rng: random.Random) -> float:
    return 1.0 if rng.random() < 0.9 else rng.random()


def mid(rng: random.Random) -> float:
    return rng.betavariate(2, 2)


@pytest.mark.parametrize(("law", "truth"), [(mastered, 0.95), (mid, 0.5)])
def test_intervals_hold_the_truth_nineteen_times_in_twenty(law: Callable[[random.Random], float], truth: float) -> None:
    """Student's hold it 83 times in 100 where 90% are mastered; docs/results.md has more settings."""
    rng = random.Random(1)
    held = 0
    for _ in range(EVALUATIONS):
        chances = [law(rng) for _ in range(30)]
        estimate = mean_over_problems([sum(rng.random() < p for _ in range(8)) / 8 for p in chances])
        held += estimate.low <= truth <= estimate.high
    assert held / EVALUATIONS >= 0.95 - MISSES


def test_a_difference_by_hand() -> None:
    # 1/2, 0, 0, 0 and a fifth, half up and half down by 1/2: mean 1/10, variance 1/10 - 1/100 = 0.09, over 4
    estimate = mean_difference([0.5, 0.0, 0.0, 0.0])
    assert estimate.value == 0.125
    assert estimate.value - estimate.low == pytest.approx(student(4) * sqrt(0.09 / 4))
    assert estimate.high - estimate.value == pytest.approx(estimate.value - estimate.low)


def test_no_difference_seen_is_not_certainty_and_no_problem_gives_none() -> None:
    estimate = mean_difference([0.0] * 20)
    assert estimate.high == -estimate.low == pytest.approx(Z * Z / (20 + Z * Z))
    with pytest.raises(ValueError, match="at least one problem"):
        mean_difference([])


@settings(max_examples=25)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=40))
def test_a_difference_lies_in_its_interval_and_turns_round_with_its_subjects(steps: list[int]) -> None:
    one, other = mean_difference([s / 8 for s in steps]), mean_difference([-s / 8 for s in steps])
    assert -1.0 <= one.low < one.high <= 1.0 and one.low <= one.value <= one.high
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
