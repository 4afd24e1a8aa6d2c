"""What a person is told of a stage that goes wrong without failing."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocstar.run import alarms as module
from rocstar.run.alarms import LEVELS, LONG_WINDOW, QUIET_STEPS, WINDOW, Level, alarms, new_alarms
from rocstar.run.stages import Row, window_means

HEALTHY: Row = {
    "verdict/right": 0.5,
    "verdict/undecided": 0.002,
    "learn/updates": 2.0,
    "learn/skipped": 0.0,
    "len/truncated": 0.1,
    "tool/none_share": 0.1,
    "tool/error_rate": 0.4,
    "tool/failed_call_share_in_correct": 0.1,
    "group/solved_share": 0.2,
    "policy/entropy": 0.3,
    "policy/logprob_gap": 1e-4,
    "suspect/constant_print": 0.02,
    "suspect/unfounded_answer": 0.1,
    "suspect/several_boxes": 0.0,
}


def stage(*changes: Row) -> list[Row]:
    """WINDOW healthy steps, then WINDOW steps for each change."""
    return [{**HEALTHY, **change} for change in ({}, *changes) for _ in range(WINDOW)]


def names(rows: Sequence[Row], *, tools: bool = True) -> list[str]:
    return [alarm.name for alarm in alarms(rows, tools=tools)]


def test_the_page_names_every_alarm_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text().partition("## Warnings during a run")[2]
    named = re.findall(r"^\| `([a-z ]+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    told = re.findall(r'\bname="([^"]+)"', inspect.getsource(module))
    assert sorted(named) == sorted({*told, "name"}) and len(set(told)) > len(LEVELS)


def test_a_healthy_stage_raises_none() -> None:
    assert names(stage()) == names(stage({})) == names([]) == []
    assert names(stage({"verdict/right": 0.9})) == []


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_each_level_raises_its_alarm_when_it_is_reached_and_not_before(level: Level) -> None:
    assert names(stage({level.metric: level.least})) == [level.name]
    assert names(stage({level.metric: level.least})[:-1]) == []
    (alarm,) = alarms(stage({level.metric: level.least}))
    assert "{" not in alarm.evidence and alarm.action and "wrong" not in alarm.action, "a reward may be its agent's own"


def test_a_step_whose_attempts_are_all_cut_is_told_at_once_and_before_what_follows_from_it() -> None:
    cut: Row = {"len/truncated": 1.0, "learn/updates": 0.0, "tool/none_share": 1.0, "verdict/right": 0.0}
    assert names([{**HEALTHY, **cut}]) == ["all cut"] and names(stage(cut))[0] == "all cut"
    assert not {"truncation", "no tool"} & set(names(stage(cut)))
    (alarm,) = alarms([{**HEALTHY, **cut}])
    assert alarm.evidence.startswith("every attempt is cut by the token limit, because none ends its first turn")
    assert "a lower learning.learning_rate" in alarm.action, "one update at 500 times the right one does this"
    (alarm,) = alarms([{**HEALTHY, **cut, "tool/none_share": 0.4}])
    assert "because some call the tool until the limit" in alarm.evidence
    (alarm,) = alarms([{**HEALTHY, **cut, "len/tokens": 0.0}])
    assert "that the agent adds to the question leave no room" in alarm.evidence
    assert names([{**HEALTHY, **cut, "len/truncated": 0.99}]) == []
    answered: Row = {**HEALTHY, **cut, "verdict/right": 0.2}
    assert names([answered]) == [] and "all cut" not in names([answered] * WINDOW), "an agent gave answers back"


def test_a_step_whose_calls_all_fail_is_told_at_once() -> None:
    broken: Row = {**HEALTHY, "tool/error_rate": 1.0, "tool/calls": 0.5, "roc/attempts": 40.0}
    assert names([HEALTHY, broken]) == ["failed calls"] and names([broken] * WINDOW) == ["failed calls"]
    assert names([{**broken, "tool/error_rate": 0.99}]) == [] and names([broken], tools=False) == []
    assert names([{**broken, "roc/attempts": 39.0}]) == [], "few calls may all fail by chance"


def test_without_tools_nobody_misses_them() -> None:
    rows = stage({"tool/none_share": 1.0})
    assert names(rows) == ["no tool"] and names(rows, tools=False) == []


def test_a_stage_in_which_hardly_anything_is_right_is_told_once_it_has_lasted() -> None:
    poor: Row = {**HEALTHY, "verdict/right": 0.019, "reward/mean": 0.019}
    assert names([poor] * (WINDOW - 1)) == [] and names([poor] * WINDOW) == ["hardly any right"]
    assert names([{**poor, "verdict/right": 0.021}] * WINDOW) == []
    assert names([{**poor, "reward/mean": 0.3}] * WINDOW) == [], "a graded reward teaches"
    assert names(stage(poor)) == ["reward collapse"], "the first cause alone"


def test_a_reward_that_falls_by_a_third_is_a_collapse() -> None:
    assert names(stage({"verdict/right": 0.36})) == []
    assert names(stage({"verdict/right": 0.34})) == ["reward collapse"]
    few, fewer = ({**HEALTHY, "verdict/right": share} for share in (0.062, 0.04))
    assert names([few] * WINDOW + [fewer] * WINDOW) == [], "chance moves a few right attempts by a third"
    begun = [{**HEALTHY, "verdict/right": 0.5 + 0.05 * (-1) ** number} for number in range(WINDOW)]
    small, large = ([{**row, "verdict/right": row["verdict/right"] - fall} for row in begun] for fall in (0.27, 0.32))
    assert (names(begun + small), names(begun + large)) == ([], ["reward collapse"]), "ten steps tell little of noise"


@pytest.mark.parametrize(("problems", "attempts", "right"), [(4, 8, 0.2), (12, 32, 0.5)], ids=["tiny", "quickstart"])
def test_a_long_stage_of_small_steps_falls_by_a_third_by_chance_and_is_no_collapse(
    problems: int, attempts: int, right: float
) -> None:
    chance = random.Random(0)

    def step(right: float) -> Row:
        rates = [chance.betavariate(2 * right, 2 * (1 - right)) if right else 0.0 for _ in range(problems)]
        made = sum(chance.random() < rate for rate in rates for _ in range(attempts))
        return {**HEALTHY, "verdict/right": made / problems / attempts, "roc/attempts": problems * attempts}

    rows = [step(right) for _ in range(600)]
    means = list(window_means(rows, "verdict/right", WINDOW))
    assert min(means) < 0.7 * max(means), "each window for itself looks like a collapse"
    assert [count for count in range(0, 600, 5 * WINDOW) if names(rows[:count])] == []
    rows += [step(0.0)] * LONG_WINDOW
    assert names(rows) == ["reward collapse"]


def test_an_alarm_that_comes_and_goes_is_raised_once() -> None:
    well, cut = HEALTHY, {**HEALTHY, "len/truncated": 0.4}
    rows = [cut] * WINDOW + ([well] * WINDOW + [cut] * WINDOW) * 3
    after = len(rows)
    rows += [well] * (QUIET_STEPS + WINDOW) + [cut] * WINDOW
    first, again = (count for count in range(len(rows) + 1) if new_alarms(rows[:count]))
    assert first == WINDOW and again > after


def test_a_stage_that_loses_all_it_could_is_told_before_the_window_is_full_and_nothing_that_follows() -> None:
    lost: Row = {"verdict/right": 0.0, "reward/mean": 0.0, "learn/updates": 0.0, "tool/none_share": 1.0}
    begun, gone = ({"roc/attempts": 64.0, **row} for row in ({"verdict/right": 0.17, "learn/updates": 2.0}, lost))
    assert names([begun, gone, gone]) == []
    assert names([begun, gone, gone, gone]) == ["reward collapse"]
    assert names([begun] + 9 * [gone]) == ["reward collapse"], "the first cause alone"
    few = [{**row, "roc/attempts": 16.0} for row in (begun, gone, gone, gone)]
    assert names(few) == [], "eight right ones were to be expected, and chance keeps them away"
    assert names([gone] * WINDOW) == ["no tool", "hardly any right"], "nothing was there to lose"


def test_steps_in_which_a_rare_problem_is_missing_are_no_collapse() -> None:
    """Attempts at one problem are right together: 16 of 640 in one step of three, and none in the next three."""
    shares = [0.0, 0.0, 0.025, 0.0, 0.0, 0.0]
    assert "reward collapse" not in names([{"verdict/right": share, "roc/attempts": 640.0} for share in shares])


def test_steps_without_a_mean_reward_are_looked_at_by_what_is_right() -> None:
    assert names([{"verdict/right": 0.0}] * WINDOW) == ["hardly any right"]


def test_a_stage_with_hardly_anything_right_tells_how_many_attempts_are_cut_and_calls_fail() -> None:
    """With room for 14 tokens every attempt is cut in which a call might help."""
    short: Row = {"verdict/right": 0.0, "reward/mean": 0.0, "len/truncated": 0.22, "tool/error_rate": 0.54}
    (alarm,) = alarms([{**HEALTHY, **short}] * WINDOW)
    assert "22% are cut by the token limit, and 54% of the tool calls fail" in alarm.evidence


def test_a_stage_shorter_than_the_window_is_looked_at_as_a_whole() -> None:
    rows: list[Row] = [{**HEALTHY, "len/truncated": 0.4}] * 3
    assert [alarm.name for alarm in alarms(rows, steps=3)] == ["truncation"]
    assert not alarms(rows[:2], steps=3) and not alarms(rows, steps=WINDOW)
