"""Advantages by hand and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.learning.advantages import advantages

BINARY_GROUPS = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=32)


def test_one_success_in_four_by_hand() -> None:
    # mean 1/4; squares 9/16 + 3 * 1/16 = 12/16; over 3: 1/4; deviation 1/2
    assert advantages((1.0, 0.0, 0.0, 0.0)) == pytest.approx((1.5, -0.5, -0.5, -0.5), abs=1e-5)
    assert advantages((1.0, 0.0, 0.0, 0.0), normalize_by_std=False) == (0.75, -0.25, -0.25, -0.25)
    assert advantages((0.1,) * 3) == (0.0,) * 3, "though the mean of these floats is not 0.1"


@pytest.mark.parametrize("rewards", [(), (1.0,)])
def test_fewer_than_two_siblings_are_refused(rewards: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="at least two siblings"):
        advantages(rewards)


@given(BINARY_GROUPS)
def test_advantages_sum_to_zero_order_like_rewards_and_have_unit_unbiased_variance(rewards: list[float]) -> None:
    result = advantages(rewards)
    assert sum(result) == pytest.approx(0.0, abs=1e-9)
    for reward, advantage in zip(rewards, result, strict=True):
        assert advantage == 0.0 if len(set(rewards)) == 1 else (advantage > 0) == (reward > 0)
    if len(set(rewards)) == 2:
        assert sum(value * value for value in result) / (len(result) - 1) == pytest.approx(1.0, abs=1e-4)
