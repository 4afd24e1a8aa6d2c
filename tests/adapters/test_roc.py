"""RoC on plain lists: no torch, no library of another trainer."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.adapters.roc import Drawn, is_kept, penalty_of_messages, reasons_of
from rocstar.learning.quality import penalty_of
from rocstar.learning.resample import seed_of_choice, select
from rocstar.types import Reason

ATTEMPTS = st.lists(
    st.builds(
        Drawn,
        group=st.sampled_from("abc"),
        reward=st.sampled_from([0.0, 1.0, None]),
        penalty=st.floats(0, 2),
        outage=st.booleans(),
    ),
    max_size=40,
)


@given(ATTEMPTS, st.integers(2, 6))
def test_a_batch_is_chosen_group_by_group_as_select_does(batch: list[Drawn], keep: int) -> None:
    reasons = reasons_of(batch, keep, seed=1, step=7)
    for group in {one.group for one in batch}:
        rows = [n for n, one in enumerate(batch) if one.group == group and one.reward is not None and not one.outage]
        rng = random.Random(seed_of_choice(1, 7, str(group)))
        kept, told = select([batch[n].reward or 0.0 for n in rows], [batch[n].penalty for n in rows], keep, rng)
        assert [reasons[n] for n in rows] == list(told)
        assert [n for n in rows if is_kept(reasons[n])] == [rows[n] for n in kept]
    assert all(
        is_kept(reason) <= (one.reward is not None and not one.outage)
        for one, reason in zip(batch, reasons, strict=True)
    )


@settings(deadline=None)
@given(ATTEMPTS, st.randoms())
def test_the_order_of_groups_changes_nothing(batch: list[Drawn], order: random.Random) -> None:
    groups = [[one for one in batch if one.group == group] for group in "abc"]
    chosen = [Counter(zip(some, reasons_of(some, 3, seed=5, step=2), strict=True)) for some in groups]
    order.shuffle(groups)
    together = [one for some in groups for one in some]
    assert Counter(zip(together, reasons_of(together, 3, seed=5, step=2), strict=True)) == sum(chosen, Counter())


def test_what_cannot_be_compared_says_why() -> None:
    batch = [Drawn("a", 1.0, 0.0), Drawn("a", 0.0, 0.0), Drawn("a", None, 0.0), Drawn("a", 1.0, 0.0, outage=True)]
    assert reasons_of(batch, 2, seed=0, step=0) == [
        Reason.KEPT_ALL, Reason.KEPT_ALL, Reason.DROPPED_UNDECIDED, Reason.DROPPED_ENVIRONMENT]  # fmt: skip


class Element:
    """A number that equals itself only, as an element of a tensor does in a set."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_equal_rewards_are_equal_whatever_holds_them() -> None:
    batch = [Drawn("a", cast(float, Element(1.0)), 0.0) for _ in range(4)]
    assert reasons_of(batch, 2, seed=0, step=0) == [Reason.DROPPED_EQUAL_REWARDS] * 4


def test_what_no_attempt_has_is_refused() -> None:
    with pytest.raises(TypeError, match="'1' is text"):
        reasons_of([Drawn("a", cast(float, "1"), 0.0), Drawn("a", 0.0, 0.0)], 2, seed=0, step=0)
    with pytest.raises(ValueError, match="whole number"):
        reasons_of([Drawn("a", n, 0.0) for n in (0.0, 1.0)], cast(int, 2.5), seed=0, step=0)
    for counts in ((1, 5, 1, 1), (0, 3, 1, 1), (1, 0, -1, 1), (1, 0, 1, 0)):
        with pytest.raises(ValueError, match="correct the counts"):
            penalty_of(**dict(zip(("calls", "failed_calls", "answer_blocks", "turns"), counts, strict=True)))


def test_it_needs_no_torch_and_no_trainer() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'trl', 'verl', 'transformers', 'numpy')));"
        "from rocstar.adapters.roc import Drawn, reasons_of;"
        "print(*reasons_of([Drawn('p', n % 2, 0.5) for n in range(8)], 4, seed=1, step=1))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Counter(said.split())["kept.quality"] == Counter(said.split())["kept.negative"] == 2


def test_messages_have_the_penalty_of_their_counts() -> None:
    tool, answer = {"role": "tool", "content": "<answer>no</answer>"}, {"role": "assistant", "content": None}
    messages = [answer, tool, answer, tool, {"role": "assistant", "content": "<answer>1</answer><answer>2</answer>"}]
    counted = penalty_of(calls=2, failed_calls=1, answer_blocks=2, turns=3)
    assert penalty_of_messages(messages, calls=2, failed_calls=1) == counted.total == 0.5 + 1 / 3
    assert penalty_of_messages([], calls=0, failed_calls=0) == 1.5
