"""Exact tests against counting every case, and the level of the test by simulation."""

from __future__ import annotations

from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.evaluation.compare import EXACT, compare_paired, flip_test


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
    assert found["p_value"] == found["sign_p_value"] == pytest.approx(expected)
    assert (found["better"], found["worse"], found["same"]) == (9, 2, 29)


def test_many_problems_take_the_normal_law_which_is_then_as_good() -> None:
    n, better = EXACT + 1, EXACT // 2 + 40
    exact = 2 * sum(comb(n, k) for k in range(better, n + 1)) / 2**n
    assert flip_test([1] * better + [-1] * (n - better)) == pytest.approx(exact, rel=0.02)


def test_attempts_need_not_be_as_many_on_every_problem() -> None:
    found = compare_paired({"p": [True, False], "q": [False]}, {"p": [True, True, False], "q": [True]})
    assert found["difference"]["value"] == pytest.approx((2 / 3 - 1 / 2 + 1) / 2)
