"""Two kept evaluations on the command line: what is refused and with which words, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli.main import run
from rocstar.record.atomic import write_json
from rocstar.types import Verdict
from tests.analysis.rows import attempt, turn, written

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


A = {"p": [True, False], "q": [False, False], "r": [True, True], "s": [False, False]}
B = {"p": [True, True], "q": [True, False], "r": [True, True], "s": [False, False]}


def test_two_evaluations_are_paired_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B, model="n", step=9, seed=1)
    assert run(["compare", a, b, "--json", "--detect", "0.1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["difference"]["value"] == 0.25
    assert (result["better"], result["worse"], result["same"]) == (2, 0, 2)
    assert result["p_value"] == result["sign_p_value"] == 0.5
    assert [row["problem_id"] for row in result["table"]] == ["p", "q", "r", "s"]
    first = result["table"][0]
    question = first.pop("question")
    assert first == {"problem_id": "p", "a": 0.5, "b": 1.0, "difference": 0.5}
    assert isinstance(question, str) and question
    assert result["plan"]["problems_needed"] > 4 and result["plan"]["power"] < 0.8


def test_greedy_attempts_are_compared_where_they_were_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", A)
    assert run(["compare", a, b, "--greedy"]) != 0
    assert f"{tmp_path / 'a'} kept no greedy attempts; compare without --greedy" in capsys.readouterr().err
    for folder, right in (("a", False), ("b", True)):
        written(tmp_path / folder / "greedy.parquet", [attempt([turn(None)], problem="p", index=0, right=right)])
    assert run(["compare", a, b, "--greedy", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["problems"], result["difference"]["value"]) == (1, 1.0)


def test_the_screen_says_difference_tests_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B)]) == 0
    shown = capsys.readouterr().out
    assert (
        "B - A +25.0%" in shown
        and "2 problems better, 0 worse, 2 the same" in shown
        and "p   50% -> 100%  What is p?" in shown
    )


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"temperature": 1.0}, "temperature"),
        ({"attempts": 4}, "attempts"),
        ({"data": {"problems": 4, "problems_sha256": "y"}}, "data.problems_sha256"),
        ({"template": {"name": "rstar2"}}, "template.name"),
        ({"a field of tomorrow": 1}, "a field of tomorrow"),
    ],
)
def test_evaluations_that_asked_differently_are_refused_by_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], field: str
) -> None:
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B, **changed)
    assert run(["compare", a, b]) == 2
    told = capsys.readouterr().err
    assert f"the evaluations differ in {field}: " in told and f"--allow {field}" in told
    assert run(["compare", a, b, "--allow", field]) == 0


def test_code_that_an_older_evaluation_did_not_note_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = evaluation(tmp_path / "a", A)
    one, other = (evaluation(tmp_path / mark, B, code={"rewards.py": mark}) for mark in "bc")
    assert run(["compare", older, one]) == 0
    assert run(["compare", one, other]) == 2
    assert "the evaluations differ in code.rewards.py: 'b' in " in capsys.readouterr().err


def test_all_fields_that_differ_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"temperature": 1.0, "data": {"problems": 5, "problems_sha256": "y"}}
    a, b = evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B, **changed)
    assert run(["compare", a, b, "--allow", "data.problems"]) == 2
    told = capsys.readouterr().err
    assert "in data.problems_sha256: " in told and "; in temperature: 0.6 in " in told
    assert "--allow data.problems_sha256 --allow temperature where" in told


def test_an_undecided_attempt_is_not_right_and_its_share_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = evaluation(tmp_path / "b", {**B, "p": [True, Verdict.UNDECIDED]})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 0
    told = capsys.readouterr().out
    assert "50.0%" in told and "2 attempts each, 12.5% undecided" in told and "B - A +12.5%" in told


def test_a_field_that_is_not_there_cannot_be_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", evaluation(tmp_path / "a", A), evaluation(tmp_path / "b", B), "--allow", "temprature"]) == 2
    assert "no such field; they have attempts" in capsys.readouterr().err


def test_the_same_problems_in_another_file_are_the_same(tmp_path: Path) -> None:
    b = evaluation(tmp_path / "b", B, data={**SETUP["data"], "path": "elsewhere.jsonl"})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 0


def test_one_evaluation_alone_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluation(tmp_path / "a", A)
    assert run(["compare", a]) == 2
    assert run(["compare", a, "--detect", "0.05", "--power", "0.9"]) == 0
    assert "to see a difference of 5.0% with chance 90%: " in capsys.readouterr().out
    assert run(["compare", a, "--detect", "0"]) == 2


def test_problems_that_only_one_has_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = evaluation(tmp_path / "b", {**B, "t": [True]})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 0
    assert "over 4 problems; 1 that only one has are left out" in capsys.readouterr().out


def test_evaluations_without_a_decided_problem_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = evaluation(tmp_path / "b", {"other": [True]})
    assert run(["compare", evaluation(tmp_path / "a", A), b]) == 2
    assert "no problem in common" in capsys.readouterr().err


def test_what_is_no_evaluation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(tmp_path / "nothing"), "x", "--runs", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert run(["compare", "x", "y", "--runs", str(tmp_path)]) == 2
    assert "name one as last/after" in capsys.readouterr().err
