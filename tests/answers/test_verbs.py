"""`rocstar verify` and `rocstar reward test` as a person types them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.support.exits import FAILED, OK, USAGE
from tests.commands import json_of
from tests.files import jsonl


@pytest.fixture
def cases(tmp_path: Path) -> str:
    rows = [
        {"text": r"so \boxed{5}", "gold": "5", "good": True},
        {"text": "the answer is 6", "gold": "7", "good": True},
        {"text": r"\boxed{x}", "gold": "9^{9^{9^{9}}}", "good": False},
    ]
    return str(jsonl(tmp_path / "cases.jsonl", *rows))


def test_verify_shows_each_case_and_a_summary(cases: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "--cases", cases, "--expected", "good"]) == OK
    out = capsys.readouterr().out
    header, *rows = out.splitlines()[:4]
    assert header.split() == ["line", "text", "gold", "verdict", "method", "milliseconds", "expected"]
    assert [row.split()[-4:-2] for row in rows] == [
        ["right", "integer"],
        ["wrong", "integer"],
        ["undecided", "too_big"],
    ]
    assert "agreed: 1" in out


def test_verify_prints_one_json_object(cases: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json_of(capsys, "verify", "--cases", cases, "--strict")
    assert [row["method"] for row in shown["rows"]] == ["no_answer"] * 3
    assert shown["summary"]["wrong"] == 3


def test_what_a_person_got_wrong_is_told_in_a_sentence(cases: str, capsys: pytest.CaptureFixture[str]) -> None:
    for extra, told in (("--graders", "magic"), "no grader"), (("--gold", "nothing"), "line 1"):
        assert cli.run(["verify", "--cases", cases, *extra]) == USAGE
        assert told in capsys.readouterr().err


def test_any_reward_function_is_set_beside_our_verdicts(cases: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("TrlReward", "compute_score"):
        tried = cli.run(["reward", "test", f"rocstar.adapters.rewards:{name}", "--data", cases, "--json"])
        assert tried in (OK, FAILED)
        shown = json.loads(capsys.readouterr().out)
        assert shown["summary"]["agrees_with_rocstar"] == shown["summary"]["compared"] == 2
        assert [row["rocstar"] for row in shown["rows"]] == ["right", "wrong", "undecided"]


ROWS: list[dict[str, Any]] = [
    {"question": "1+1?", "answer": 2, "level": 1},
    {"question": "2+1?", "answer": 3, "level": 2},
    {"question": "1+2?", "answer": 3, "level": 3},
]
REWARD = """
def within(prompts, completions, answer, level, **columns):
    return [
        float(f"boxed{{{wanted}}}" in said and asked.endswith("?") and 1 <= hard <= 3)
        for asked, said, wanted, hard in zip(prompts, completions, answer, level)
    ]
def paid(solution_str, extra_info, **_):
    return 1.0 if extra_info["question"] else 0.0
"""


@pytest.mark.parametrize("form", ["jsonl", "verl.jsonl"])
def test_a_reward_alone_is_tried_on_problems(
    modules: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(modules)
    (modules / "reward_of_a_test.py").write_text(REWARD)
    rows = ROWS
    if form == "verl.jsonl":
        told = [([{"role": "user", "content": row["question"]}], {"ground_truth": str(row["answer"])}) for row in ROWS]
        rows = [
            {"data_source": "d", "prompt": prompt, "reward_model": model, "level": row["level"]}
            for row, (prompt, model) in zip(ROWS, told, strict=True)
        ]
    file = jsonl(modules / f"problems.{form}", *rows)
    shown = json_of(capsys, "reward", "test", "reward_of_a_test.py:within", "--data", str(file))
    assert shown["summary"]["agreement"] == 1.0 and shown["summary"]["cases"] == 6
    assert [row["text"] for row in shown["rows"]][:2] == ["<answer>\\boxed{2}</answer>", "<answer>\\boxed{3}</answer>"]
    assert [row["expected"] for row in shown["rows"]] == ["right", "wrong"] * 3
    assert cli.run(["reward", "test", "reward_of_a_test.py:paid", "--data", str(file)]) == OK
    assert "agreement: 0.5\n" in capsys.readouterr().out


def test_problems_may_have_other_columns_and_no_expected_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"ask": "1+1?", "is": "2"}\n')
    command = ["reward", "test", "rocstar.adapters.rewards:compute_score", "--data", f"{tmp_path}/p.jsonl"]
    assert json_of(capsys, *command, "--question", "ask", "--gold", "is")["summary"]["agreement"] == 1.0
    assert cli.run([*command, "--question", "ask", "--expected", "good"]) == USAGE
    assert "--expected names a column of cases" in capsys.readouterr().err


def test_a_reward_function_that_raises_fails_the_command(
    cases: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad_reward_for_a_test.py").write_text("def f(completions, **columns):\n    raise KeyError('level')\n")
    assert cli.run(["reward", "test", f"{tmp_path}/bad_reward_for_a_test.py:f", "--data", cases]) == FAILED
    out = capsys.readouterr().out
    assert "KeyError: 'level' (bad_reward_for_a_test.py, line 2)" in out and "None" not in out.split("\n\n")[1]


def test_a_graded_reward_is_compared_with_the_grade_that_somebody_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half_reward_for_a_test.py").write_text("def f(completions, grade, **columns):\n    return [0.5]\n")
    data = jsonl(tmp_path / "graded.jsonl", *({"text": "1", "gold": "2", "grade": grade} for grade in (0.5, 1, 0.25)))
    asked = ["reward", "test", f"{tmp_path}/half_reward_for_a_test.py:f", "--data", str(data)]
    assert cli.run([*asked, "--expected", "grade", "--limit", "2"]) == OK
    assert "expected: 2\nagreed: 1\n" in capsys.readouterr().out
    assert cli.run(["verify", "--cases", str(data), "--expected", "grade"]) == USAGE  # it gives verdicts only
    assert "expected true or false, got 0.5" in capsys.readouterr().err


def test_of_problems_without_a_reference_nothing_is_expected_and_their_own_columns_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "1+1?", "solution": "2"}\n')
    (tmp_path / "own_reward_for_a_test.py").write_text(
        "def f(completions, solution, **columns):\n    return [float(solution in (['2'], [['2']]))]\n"
    )
    asked = ["reward", "test", f"{tmp_path}/own_reward_for_a_test.py:f", "--data", f"{tmp_path}/p.jsonl", "--gold", ""]
    shown = json_of(capsys, *asked)
    assert [row["reward"] for row in shown["rows"]] == [1.0, 1.0]
    assert not any("expected" in row for row in shown["rows"]) and "agreement" not in shown["summary"]
    (tmp_path / "p.jsonl").write_text('{"text": "[1]", "solution": ["2"]}\n')  # a case, whose reference is a list
    assert [row["reward"] for row in json_of(capsys, *asked)["rows"]] == [1.0]
