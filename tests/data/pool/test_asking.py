"""Labels are checked by what a model answers: `rocstar eval` asks it, `rocstar data build` reads the attempts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("pyarrow")

from rocstar.cli.main import run
from rocstar.data.pool.rules import AnswerBook
from tests.commands import json_of
from tests.evaluation.served import served, text
from tests.files import jsonl

ROWS = {"What is two plus two?": "4", "What is two plus three?": "6", "What is one over three?": "\\frac{1}{3}"}
SAID = {"two?": "4", "three?": "5", "$p + q$.": "4"}
RECIPE = """data = "."
known_benchmarks = false
agreement.answers = ["theirs.jsonl"]
rewrite.fractions_and_roots = true

[[source]]
name = "s"
path = "rows.jsonl"
"""


def answers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every question rightly."""
    asked = body["messages"][-1]["content"].strip()
    return text("So \\boxed{" + next(answer for end, answer in SAID.items() if asked.endswith(end)) + "}.")


def test_an_evaluation_of_a_pool_answers_all_its_questions_and_wrong_labels_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(Path("rows.jsonl"), *({"question": q, "answer": a} for q, a in ROWS.items()))
    Path("pool.toml").write_text(RECIPE)
    assert run(["data", "build", "pool.toml", "out=unchecked", "rules.skip=disagreement"]) == 0
    with served(answers) as model:
        asked = ["--endpoint", model.url, "--data", "unchecked/problems.jsonl", "--n", "2", "--max-turns", "1"]
        capsys.readouterr()
        attempts = json_of(capsys, "eval", "m", *asked)["saved"] + "/samples.parquet"
    sheet = json_of(capsys, "data", "build", "pool.toml", "out=checked", f"agreement.answers={attempts}")
    assert (sheet["kept"], sheet["agreement_unasked"], sheet["funnel"]["disagreement"]["s"]) == (2, 0, 1)
    (file,) = [file for file in sheet["inputs"] if file["role"] == "answers"]
    assert (file["path"], file["rows"]) == (attempts, 6)
    dropped = json.loads(Path("checked/dropped.jsonl").read_text())
    assert dropped["question"] == "What is two plus three?"
    assert "0 of 2 answers equal the label 6, at least 2 must; others end with 2 x" in dropped["evidence"]


def test_answers_that_are_not_there_stop_a_build_before_it_reads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("")
    Path("pool.toml").write_text(RECIPE)
    assert run(["data", "build", "pool.toml"]) == 2
    assert "theirs.jsonl does not exist" in capsys.readouterr().err and not Path("pools").exists()


def test_a_fault_is_no_answer_and_an_attempt_without_one_is(tmp_path: Path) -> None:
    ends = [("answered", "4"), ("environment_failed", None), ("max_tokens", None)]
    rows = [{"problem_id": "p", "stop": stop, "extracted": found, "question": "?"} for stop, found in ends]
    jsonl(tmp_path / "attempts.jsonl", *rows)
    (tmp_path / "more.jsonl").write_text(json.dumps({"id": "p", "answers": ["5"]}))
    book = AnswerBook(tmp_path / "answers.sqlite")
    assert [book.read(tmp_path / name) for name in ("attempts.jsonl", "more.jsonl")] == [3, 1]
    assert book.answers("p") == ["\\boxed{4}", "", "5"]
