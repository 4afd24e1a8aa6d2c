"""Two kept evaluations on the command line: what is refused and with which words, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli.main import run
from rocstar.record.atomic import write_json
from rocstar.types import Verdict
from tests.analysis.rows import attempt, turn, written
from tests.commands import json_of

SETUP: dict[str, Any] = {
    "model": "m",
    "step": 1,
    "data": {"path": "a.jsonl", "problems": 4, "problems_sha256": "x"},
    "attempts": 2,
    "temperature": 0.6,
    "template": {"name": "compact"},
    "seed": 0,
}


def evaluation(folder: Path, right: Mapping[str, list[Any]], **changed: Any) -> str:
    """right: of each attempt, as `rows.attempt` takes it."""
    records = [
        attempt([turn(None)], problem=name, index=index, right=one)
        for name, verdicts in right.items()
        for index, one in enumerate(verdicts)
    ]
    written(folder / "samples.parquet", records)
    write_json(folder / "result.json", {"setup": {**SETUP, **changed}})
    return str(folder)


MOVED = {**SETUP["data"], "path": "elsewhere.jsonl"}
OTHERS = {"path": "a.jsonl", "problems": 4, "problems_sha256": "y"}
A = {"p": [True, False], "q": [False, False], "r": [True, True], "s": [False, False]}
B = {"p": [True, True], "q": [True, False], "r": [True, True], "s": [False, False]}


def test_two_evaluations_are_paired_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B, model="n", step=9, seed=1, data=MOVED)
    result = json_of(capsys, "compare", a, b)
    assert result["difference"]["value"] == 0.25
    assert (result["better"], result["worse"], result["same"]) == (2, 0, 2)
    assert result["p_value"] == result["sign_p_value"] == 0.5
    assert [row["problem_id"] for row in result["table"]] == ["p", "q", "r", "s"]
    row = {"problem_id": "p", "a": 0.5, "b": 1.0, "difference": 0.5, "question": "What is p?"}
    assert result["table"][0] == row


def test_greedy_attempts_are_compared_where_they_were_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", A)
    assert run(["compare", a, b, "--greedy"]) != 0
    assert f"{tmp_path / 'a'} kept no greedy attempts; compare without --greedy" in capsys.readouterr().err
    for folder, right in (("a", False), ("b", True)):
        written(tmp_path / folder / "greedy.parquet", [attempt([turn(None)], problem="p", index=0, right=right)])
    result = json_of(capsys, "compare", a, b, "--greedy")
    assert (result["problems"], result["difference"]["value"]) == (1, 1.0)


def test_the_screen_says_difference_tests_and_problems_and_what_only_one_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = evaluation(tmp_path / "b", {**B, "t": [True]})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 0
    shown = capsys.readouterr().out
    assert "reward/parts/half_share  0.188 -> 0.35\n" in shown
    assert "B - A +25.0%" in shown and "2 problems better, 0 worse, 2 the same" in shown
    assert "p   50% -> 100%  What is p?" in shown
    assert "over 4 problems; 1 that only one has are left out" in shown


def test_code_that_an_older_evaluation_did_not_note_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = evaluation(tmp_path / "a", A)
    one, other = (evaluation(tmp_path / mark, B, code={"rewards.py": mark}) for mark in "bc")
    assert run(["compare", older, one]) == 0
    assert run(["compare", one, other]) == 2
    assert "the evaluations differ in code.rewards.py: 'b' in " in capsys.readouterr().err


def test_an_undecided_attempt_is_not_right_and_its_share_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = evaluation(tmp_path / "b", {**B, "p": [True, Verdict.UNDECIDED]})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 0
    told = capsys.readouterr().out
    assert "50.0%" in told and "2 attempts each, 12.5% undecided" in told and "B - A +12.5%" in told


@pytest.mark.parametrize(
    ("right", "changed", "allowed", "told"),
    [
        (B, {"temperature": 1.0}, "temperature", ["the evaluations differ in temperature: ", "--allow temperature"]),
        (B, {"a field of tomorrow": 1}, "a field of tomorrow", ["--allow a field of tomorrow"]),
        (B, {"temperature": 1.0, "data": OTHERS}, None, [
            "in data.problems_sha256: ", "; in temperature: 0.6 in ",
            "--allow data.problems_sha256 --allow temperature to rocstar compare if",
        ]),
        ({"other": [True]}, {}, None, ["no problem in common"]),
    ],
)  # fmt: skip
def test_evaluations_that_cannot_be_compared_are_refused_unless_their_differences_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], right: Any, changed: Any, allowed: str | None, told: list[str]
) -> None:
    both = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", right, **changed)
    assert run(["compare", *both]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in told), said
    if allowed:
        assert run(["compare", *both, "--allow", allowed]) == 0


def test_what_is_no_evaluation_or_no_field_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B)]
    for arguments, said in (
        ([str(tmp_path / "nothing"), "x"], "there is no run"),
        (["x", "y"], "name one as last/after"),
        ([*both, "--allow", "temprature"], "no such field; they have attempts"),
    ):
        assert run(["compare", *arguments, "--runs", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
