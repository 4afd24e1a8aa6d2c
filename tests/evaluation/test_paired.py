"""Exact tests against counting every case, level and power by simulation, and plans against their own definition."""

from __future__ import annotations

import random
from itertools import product
from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.evaluation.compare import (
    EXACT,
    Spread,
    attempts_needed,
    compare_paired,
    flip_test,
    power_of,
    problems_needed,
    spread_of,
    spread_of_one,
)


@given(st.lists(st.integers(-5, 5), max_size=9))
def test_the_flip_test_counts_every_choice_of_signs(steps: list[int]) -> None:
    sizes = [abs(step) for step in steps if step]
    sums = [
        sum(s * size for s, size in zip(signs, sizes, strict=True)) for signs in product((1, -1), repeat=len(sizes))
    ]
    expected = sum(abs(one) >= abs(sum(steps)) for one in sums) / len(sums)
    assert flip_test(steps) == pytest.approx(expected)


def test_with_one_attempt_each_it_is_mcnemars_exact_test() -> None:
    # 9 problems gained and 2 lost: 2 * (C(11, 0) + C(11, 1) + C(11, 2)) / 2^11
    a = {str(n): [n in (0, 1)] for n in range(40)}
    b = {str(n): [2 <= n < 11] for n in range(40)}
    found = compare_paired(a, b)
    expected = 2 * sum(comb(11, n) for n in range(3)) / 2**11
    assert found.p_value == found.sign_p_value == pytest.approx(expected)
    assert (found.better, found.worse, found.same) == (9, 2, 29)


def test_many_problems_take_the_normal_law_which_is_then_as_good() -> None:
    n, better = EXACT + 1, EXACT // 2 + 40
    exact = 2 * sum(comb(n, k) for k in range(better, n + 1)) / 2**n
    assert flip_test([1] * better + [-1] * (n - better)) == pytest.approx(exact, rel=0.02)


def test_attempts_need_not_be_as_many_on_every_problem() -> None:
    found = compare_paired({"p": [True, False], "q": [False]}, {"p": [True, True, False], "q": [True]})
    assert found.difference.value == pytest.approx((2 / 3 - 1 / 2 + 1) / 2)


def simulated(rng: random.Random, problems: int, attempts: int, gain: float) -> tuple[dict[str, list[bool]], ...]:
    chances = [rng.uniform(0.2, 0.6) for _ in range(problems)]
    return tuple(
        {str(n): [rng.random() < p + more for _ in range(attempts)] for n, p in enumerate(chances)}
        for more in (0.0, gain)
    )


@pytest.mark.parametrize(("gain", "problems"), [(0.0, 40), (0.08, 40)])
def test_differences_are_seen_as_often_as_stated(gain: float, problems: int) -> None:
    rng = random.Random(3)
    times = 100
    seen = sum(compare_paired(*simulated(rng, problems, 8, gain)).p_value <= 0.05 for _ in range(times)) / times
    one_attempt = 2 * (0.4 * 0.6 - 0.4**2 / 12) + gain * (1 - 0.8) - gain**2
    stated = power_of(Spread(between=0.0, attempts=one_attempt), gain, problems, 8) if gain else 0.05
    assert seen == pytest.approx(stated, abs=3 * sqrt(stated * (1 - stated) / times) + 0.02)


def test_a_plan_reaches_its_power_and_one_problem_fewer_does_not() -> None:
    spread = Spread(between=0.01, attempts=0.4)
    needed = problems_needed(spread, 0.05, 4)
    assert power_of(spread, 0.05, needed, 4) >= 0.8 > power_of(spread, 0.05, needed - 1, 4)


def test_no_number_of_attempts_helps_where_problems_differ_too_much() -> None:
    assert attempts_needed(Spread(between=0.04, attempts=0.4), 0.05, 100) is None
    attempts = attempts_needed(Spread(between=0.0, attempts=0.4), 0.05, 100)
    assert attempts is not None
    assert power_of(Spread(between=0.0, attempts=0.4), 0.05, 100, attempts) >= 0.8 - 1e-3


def test_spread_is_parted_into_problems_and_attempts() -> None:
    rng = random.Random(0)
    a, b = {}, {}
    for n in range(2000):
        chance, change = 0.5, rng.choice((-0.2, 0.2))
        a[str(n)] = [rng.random() < chance for _ in range(4)]
        b[str(n)] = [rng.random() < chance + change for _ in range(4)]
    spread = spread_of(a, b)
    assert spread.between == pytest.approx(0.04, abs=0.01)
    assert spread.attempts == pytest.approx(0.25 + 0.21, abs=0.01)


def test_one_evaluation_plans_for_a_second_like_it() -> None:
    assert spread_of_one({"p": [True], "q": [False]}).attempts == pytest.approx(0.5)
    assert spread_of_one({"p": [True, False], "q": [True, True]}).attempts == pytest.approx(0.5)


@pytest.mark.parametrize(("difference", "power"), [(0.0, 0.8), (0.1, 1.0), (0.1, 0.05)])
def test_an_impossible_plan_is_refused(difference: float, power: float) -> None:
    with pytest.raises(ValueError, match="needs a difference above 0"):
        problems_needed(Spread(between=0.0, attempts=0.4), difference, 4, power)
