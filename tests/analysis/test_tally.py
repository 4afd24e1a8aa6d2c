"""Counts by step over rollout files, and what comes after a failed call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocstar.analysis.attempts import Attempt, CallFacts, read_attempts
from rocstar.analysis.tally import Counts, after_errors, right_after
from rocstar.record.rollouts import AttemptRecord
from rocstar.types import Stop, Verdict
from tests.analysis.rows import attempt, turn, written

FAILS = "NameError: name 'x' is not defined\n"


def counted(folder: Path, records: Sequence[AttemptRecord]) -> Counts:
    counts = Counts()
    for one in read_attempts(written(folder / "a.parquet", records), tokens=False):
        assert one.step == 1
        counts.add(one)
    return counts


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([(0, "x", "NameError"), (1, "x=1", None)], ["REPAIRED"]),
        ([(0, "print( x )", "NameError"), (1, "print(\n x )", "NameError")], ["REPEATED", "GAVE_UP"]),
        ([(0, "x", "NameError"), (1, "y", "NameError")], ["FAILED_AGAIN", "GAVE_UP"]),
        ([(0, "x", "NameError"), (0, "1", None)], ["GAVE_UP"]),  # a call of the same turn answers nothing
    ],
)
def test_what_comes_after_a_failed_call_is_told_by_the_next_turns_call(calls: Any, found: list[str]) -> None:
    made = tuple(CallFacts(turn=place, text=text, error=error) for place, text, error in calls)
    whole = Attempt(step=0, problem="p", right=None, cut=False, tokens=0, calls=made)
    assert [what.name for _, what in after_errors(whole)] == found
    cut = replace(whole, cut=True)
    assert [what.name for _, what in after_errors(cut)] == [name.replace("GAVE_UP", "CUT") for name in found]


def test_an_undecided_attempt_is_not_right(tmp_path: Path) -> None:
    records = [attempt([turn(None)], index=n, right=n < 3) for n in range(4)]
    records.append(attempt([turn(None)], index=4, right=Verdict.UNDECIDED))
    figures = counted(tmp_path, records).figures()
    assert (figures["right_share"], figures["undecided_share"]) == (3 / 5, 1 / 5)


def test_a_file_is_counted_by_hand(tmp_path: Path) -> None:
    records = [
        attempt([turn("x", FAILS), turn("1"), turn(None)], problem="a", index=0),
        attempt([turn("1"), turn(None)], problem="a", index=1, right=False),
        attempt([turn(None)], problem="b", index=0),
        attempt([turn("x", FAILS)], problem="b", index=1, right=False, stop=Stop.MAX_TURNS),
        attempt([turn(None)], problem="b", index=2, right=None),
    ]
    tally = counted(tmp_path, records)
    figures = tally.figures()
    by_hand = {
        "right_share": 0.5,  # of four with a verdict
        "failed_call_share": 0.5,
        "failed_call_share_in_right": 0.5,
        "right_with_failed_call_share": 0.5,
        "attempts": 5,
        "calls": 4 / 5,
        "no_call_share": 2 / 5,
        "cut_share": 1 / 5,
        "tokens": (13 + 8 + 3 + 5 + 3) / 5,
    }
    assert {name: figures[name] for name in by_hand} == pytest.approx(by_hand)
    assert figures["errors"] == {"NameError": 2}
    assert figures["after_error"]["repaired"] == figures["after_error"]["cut"] == 1
    whole = Counts.of_all([tally, Counts(), tally])
    assert whole.errors == {"NameError": 4} and whole.attempts == 10
    assert (right_after(whole)["repaired"], right_after(whole)["cut"]) == (1.0, 0.0)


def test_attempts_that_a_fault_of_ours_ended_are_left_out(tmp_path: Path) -> None:
    failed = attempt([turn("1")], right=None, stop=Stop.ENVIRONMENT_FAILED)
    failed = replace(failed, trajectory=replace(failed.trajectory, fault="the sandbox died"))
    file = written(tmp_path / "a.parquet", [failed, attempt([turn(None)])])
    assert len(list(read_attempts(file, tokens=False))) == 1
