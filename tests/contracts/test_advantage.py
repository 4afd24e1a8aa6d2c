"""What every advantage promises: one finite number for each reward, zeros where all are equal, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.config.sections import LearningSection
from rocstar.learning.advantages import ADVANTAGES, GroupAdvantages, advantage_of
from tests.contracts.own import own, refusal

NAMES = [*ADVANTAGES, *own("learning.advantage", "leave_one_out")]
GROUPS = st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-2, 2).map(lambda it: round(it, 3))), min_size=2)


def made(name: str, *folders: Path) -> GroupAdvantages:
    return advantage_of(LearningSection(advantage=name), folders)


every_advantage = pytest.mark.parametrize("advantage", [made(name) for name in NAMES], ids=NAMES)


@every_advantage
@given(rewards=GROUPS)
def test_a_higher_reward_has_no_lower_advantage(advantage: GroupAdvantages, rewards: list[float]) -> None:
    found = dict(zip(rewards, advantage(rewards), strict=True))
    assert [found[reward] for reward in sorted(found)] == sorted(found.values())
    for order in (rewards, rewards[::-1], sorted(rewards)):  # equal rewards have equal advantages
        assert advantage(order) == pytest.approx([found[reward] for reward in order], abs=1e-9)


@every_advantage
def test_one_success_stands_above_its_siblings(advantage: GroupAdvantages) -> None:
    right, *wrong = advantage([1.0, 0.0, 0.0, 0.0])
    assert right > 0 and all(value < 0 for value in wrong)
    for reward in (0.0, 1.0, 0.25):
        assert advantage([reward] * 8) == pytest.approx([0.0] * 8, abs=1e-12)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def own(rewards): ...", "should take (rewards, settings)"),
        ("def own(rewards, settings): return [1.0]", "returned (1.0,) for the rewards (1.0, 0.0)"),
        (
            "def own(rewards, settings): return [r / 0.0 if r else 0.0 for r in rewards]",
            "failed on the rewards 1 and 0: ZeroDivisionError",
        ),
        ("def own(rewards, settings): return [float('nan')] * 2", "return one number for each"),
        ("def own(rewards, settings): return {0: 1.0, 1: 0.0}", "returned {0: 1.0, 1: 0.0} for"),
        ("def own(rewards, settings): return '12'", "returned '12' for"),
        ("def own(rewards, settings): ...", "returned None for the rewards (1.0, 0.0)"),
        ("def own(rewards, settings): return 0.5", "returned 0.5 for"),
        ("def own(rewards, settings): return [10**400, 0]", "failed on the rewards 1 and 0: OverflowError"),
        ("def own(rewards, settings): return ['1', '2']", "returned ('1', '2') for"),
        ("def own(rewards, settings): return [True, False]", "returned (True, False) for"),
    ],
)
def test_an_advantage_that_is_none_is_refused(modules: Path, code: str, said: str) -> None:
    assert said in refusal(modules, "learning.advantage", code, lambda name: made(name, modules))


@pytest.mark.parametrize(("later", "said"), [("1 / 0", "1, 0 and 1: ZeroDivisionError"), ("['x'] * 3", "ned ('x',")])
def test_an_advantage_that_goes_wrong_on_a_group_of_a_step_is_told(modules: Path, later: str, said: str) -> None:
    code = f"def own(rewards, settings): return [1.0, -1.0] if len(rewards) == 2 else {later}"
    assert said in refusal(modules, "learning.advantage", code, lambda name: made(name, modules)([1.0, 0.0, 1.0]))
