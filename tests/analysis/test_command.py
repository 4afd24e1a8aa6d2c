"""`rocstar analyze` over a run that learns, its evaluation, and its metrics alone."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rocstar.analysis.report import analyse
from rocstar.analysis.screen import _tokens, number
from rocstar.analysis.sources import find_source
from rocstar.cli.main import run
from rocstar.evaluation.contamination import trained_questions
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from tests.analysis.rows import attempt, turn, written
from tests.commands import json_of
from tests.files import jsonl
from tests.tiny_run import finished_run


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    (report,) = json_of(capsys, "analyze", *arguments)["reports"]
    return dict(report)


def made_run(folder: Path) -> RunFolder:
    """A run folder of two steps as a trainer leaves it, without its model."""
    made = RunFolder(folder / "runs" / "r")
    made.path.mkdir(parents=True)
    write_json(made.path / "run.json", {"name": "r"})
    write_json(made.resolved, {"data": {}, "stage": []})
    right = [attempt([turn("1"), turn(None)], problem="p", index=index) for index in range(3)]
    fails = attempt([turn("x", "NameError: x\n"), turn("1"), turn(None)], problem="p", index=3)
    written(made.rollout_file(1), [*right, fails], step=1)
    written(made.rollout_file(2), right, step=2)
    rows = [{"step": step, "reward/mean": 1.0, "tool/failed_call_share_in_correct": 0.2} for step in (1, 2)]
    jsonl(made.metrics, *rows)
    return made


@pytest.mark.slow
def test_a_run_that_learned_is_analysed_with_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ended = finished_run(tmp_path_factory.getbasetemp())
    assert ended.code == 0
    report = told(capsys, "last", "--runs", str(folder / "runs"))
    steps = report["by_step"]
    assert len(steps) == 7 and all(row["attempts"] == 8 for row in steps)
    by_metric = {row["step"]: row for row in report["training"]}
    for row in steps:
        assert row["right_share"] == pytest.approx(by_metric[row["step"]]["reward"])
        assert row["calls"] == pytest.approx(by_metric[row["step"]]["calls"])
        assert row["failed_call_share_in_right"] == pytest.approx(by_metric[row["step"]]["failed_call_share_in_right"])
    assert {row["name"] for row in report["evaluations"]} == {"before", "after"}
    scored = [row for row in report["tokens"]["by_step"] if row["attempts"]]
    assert scored and all(0 < row["entropy"] < 6 for row in scored)
    kept = told(capsys, "last/after", "--entropy", "--runs", str(folder / "runs"))
    (row,) = kept["tokens"]["by_step"]
    assert row["attempts"] == kept["whole"]["attempts"] and row["entropy"] > 0
    assert kept["contamination"]["questions"] == 2


def test_a_learner_pass_gives_the_entropies_that_training_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch

    from rocstar.cli.verbs.analyze import entropies_of
    from tests.learning.examples import policy

    mine = policy()
    mine.save(tmp_path / "model")
    (found,) = entropies_of(tmp_path / "model", 2.0)([[1, 2, 3, 4]], [[False, False, True, True]])
    mine.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = mine.model.eval()(torch.tensor([[1, 2, 3, 4]])).logits[0, :, : mine.codec.vocab_size]
    logprobs = (logits / 2.0).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    assert found == pytest.approx([0.0, 0.0, float(expected[1]), float(expected[2])], abs=1e-5)


def test_steps_and_errors_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path)
    read = list[tuple[int, int]]()
    analyse(find_source("r", tmp_path / "runs"), progress=lambda done, total: read.append((done, total)))
    assert read == [(1, 2), (2, 2)], "files read so far, and all"
    report = told(capsys, "r", "--runs", str(tmp_path / "runs"))
    assert [row["failed_call_share_in_right"] for row in report["by_step"]] == [pytest.approx(1 / 5), 0.0]
    assert report["after_error"] == [
        {"error": "NameError", "failed": 1, "repaired": 1, "repeated": 0, "failed again": 0, "gave up": 0, "cut": 0}
    ]
    assert "tokens" not in report  # no tokenizer is there


def test_what_is_suspicious_is_shown_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_run(tmp_path)
    rows = [{"step": step, "reward/mean": 1.0, "suspect/constant_print": 0.25 * step} for step in (1, 2)]
    jsonl(made.metrics, *rows)
    assert run(["analyze", "r", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out.split("\n\n")
    (suspicion,) = (part.splitlines() for part in shown if part.startswith("Suspicion: "))
    assert [line.split() for line in suspicion[2:]] == [["1", "25.0%", "-", "-"], ["2", "50.0%", "-", "-"]]
    report = told(capsys, "r", "--runs", str(tmp_path / "runs"))
    assert [row["constant_print"] for row in report["training"]] == [0.25, 0.5]


def test_a_number_past_a_million_millions_is_shown_by_its_power_of_ten() -> None:
    assert [number(value, 3) for value in (1e300, -2.5e13, 1234.5, None)] == ["1e+300", "-2.5e+13", "1,234.500", "-"]


def test_no_text_of_tokens_is_on_the_screen() -> None:
    counts = {"attempts": 1, "entropy": 0.5, "temperature": 1.0, "step": 3}
    tokens = {
        "by_step": [defaultdict(int, counts)],
        "words": {"forking": {"wait": 4}},
        "examples": {"forking": {"tokens": [{"text": "RAW"}]}},
    }
    shown = "\n".join(_tokens(tokens))
    assert "--json" in shown and "wait" not in shown and "RAW" not in shown


def test_an_evaluation_says_which_questions_its_run_had_trained_on_unless_no_attempts_were_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_run(tmp_path)
    folder = made.evaluation("test", 1)
    written(folder / "samples.parquet", [attempt([turn(None)], problem=name) for name in ("p", "new")])
    write_json(folder / "result.json", {"setup": {"model": "nowhere"}})
    note = told(capsys, "r/test", "--runs", str(tmp_path / "runs"))["contamination"]
    assert (note["questions"], note["same"], note["trained_questions"]) == (2, 1, 1)
    for step in (1, 2):
        made.rollout_file(step).unlink()
    assert told(capsys, "r/test", "--runs", str(tmp_path / "runs"))["contamination"] is None, "nobody knows"
    assert run(["analyze", "r", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "no attempts are there" in shown and "Fig. 4" in shown and "20.0%" in shown, "its metrics are left"


def test_attempts_of_each_nth_step_back_from_the_last_are_read_and_the_metrics_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_run(tmp_path)
    for step in (3, 4, 5, 6):
        written(made.rollout_file(step), [attempt([turn(None)])], step=step)
    report = told(capsys, "r", "--every", "3", "--runs", str(tmp_path / "runs"))
    assert [row["step"] for row in report["by_step"]] == [3, 6] and report["whole"]["attempts"] == 2
    assert [row["step"] for row in report["training"]] == [1, 2]
    assert run(["analyze", "r", "--every", "2", "--swap", "--runs", str(tmp_path / "runs")]) == 2


def test_training_up_to_the_evaluated_step_counts_and_siblings_give_their_question_once(tmp_path: Path) -> None:
    """Of the 8.4 million attempts of a run of the paper's size, an evaluation is compared with 260,000."""
    made = made_run(tmp_path)
    written(made.rollout_file(2), [attempt([turn(None)], problem="late")], step=2)
    assert list(trained_questions(made, 1)) == ["What is p?"]
    assert list(trained_questions(made, 2)) == ["What is p?", "What is late?"]


def test_pictures_of_two_runs_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made_run(tmp_path)
    names = ["r", str(tmp_path / "runs" / "r")]
    assert run(["analyze", *names, "--runs", str(tmp_path / "runs"), "--pictures", str(tmp_path / "p")]) == 0
    assert {file.name for file in (tmp_path / "p").iterdir()} == {"fig4.png", "fig8.png"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.jsonl"], "a.jsonl is not a file of attempts"),
        (["a.parquet", "--entropy"], "--entropy needs the weights"),
        (["nothing"], "there is no run nothing"),
    ],
)
def test_what_cannot_be_analysed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    written(tmp_path / "a.parquet", [attempt([turn(None)])])
    first = str(tmp_path / arguments[0]) if "." in arguments[0] else arguments[0]
    assert run(["analyze", first, *arguments[1:], "--runs", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_entropies_at_two_temperatures_stand_in_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = RunFolder(tmp_path / "runs" / "r")
    made.path.mkdir(parents=True)
    write_json(made.path / "run.json", {"name": "r"})
    stages = [{"name": f"s{t}", "rollout": {"temperature": t}} for t in (1.0, 0.6)]
    write_json(made.resolved, {"data": {}, "stage": [{"name": "cold"}, *stages]})
    rows = [
        {"step": step, "stage": f"s{t}", "reward/mean": 0.5, "policy/entropy": e}
        for step, t, e in ((1, 1.0, 0.91), (2, 1.0, 0.92), (3, 0.6, 0.31), (4, 0.6, 0.32))
    ]
    jsonl(made.metrics, *rows)
    report = told(capsys, "r", "--runs", str(tmp_path / "runs"))
    assert [row["temperature"] for row in report["training"]] == [1.0, 1.0, 0.6, 0.6]
    assert run(["analyze", "r", "--runs", str(tmp_path / "runs")]) == 0
    first, second = capsys.readouterr().out.split("entropies at temperature ")[1:]
    assert first.startswith("1\n") and "0.910" in first and "0.920" in first and "0.310" not in first
    assert second.startswith("0.6\n") and "0.310" in second and "0.910" not in second


def test_an_evaluation_before_the_first_step_is_of_the_model_that_the_run_began_with(tmp_path: Path) -> None:
    made, model = made_run(tmp_path), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write_json(made.resolved, {"model": {"path": str(model)}, "stage": []})
    for step in (0, 2):
        written(made.evaluation("eval", step) / "samples.parquet", [attempt([turn(None)])])
        write_json(made.evaluation("eval", step) / "result.json", {"setup": {"model": "r", "step": step}})
    assert find_source("r/eval@0", tmp_path / "runs").model == model
    assert find_source("r/eval@2", tmp_path / "runs").model is None


def test_an_evaluation_is_scored_at_the_temperature_of_its_runs_rollouts(tmp_path: Path) -> None:
    made = made_run(tmp_path)
    write_json(made.resolved, {"stage": [{"name": "s", "rollout": {"temperature": 0.8}}]})
    folder = made.evaluation("after", 2)
    written(folder / "samples.parquet", [attempt([turn("1"), turn(None)])])
    write_json(folder / "result.json", {"setup": {"model": "r", "step": 2, "temperature": 0.6}})
    assert find_source("r/after", tmp_path / "runs").temperatures()(2) == 0.8
