"""What `runs show` says of finished and killed runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.record.show import cpu_seconds, note_failure, paired_transcripts, show_run, state_of, summary_of
from rocstar.record.tracker import RunTracker
from tests.record.examples import run


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "interval": [value - 0.05, value + 0.05], "n": 400}


def evaluate(folder: RunFolder, name: str, step: int, accuracy: float, **more: Any) -> None:
    result = {
        "accuracy": figure(accuracy),
        "greedy": None,
        "tool_error_share_in_correct": 0.25,
        "no_tool_share": 0.1,
        "mean_response_tokens": 23.5,
        "transcripts": [{"problem_id": "p", "text": name, "verdict": "right"}],
    } | more
    folder.evaluation(name, step).mkdir(parents=True)
    write_json(folder.evaluation(name, step) / "result.json", result)


def trained(folder: RunFolder, steps: int) -> None:
    with RunTracker(folder) as tracker:
        for step in range(1, steps + 1):
            if step in (1, 3):
                name, kind = ("cold", "sft") if step == 1 else ("stage1", "rl")
                tracker.start_stage(name, kind, 2 if step == 1 else 3)
            tracker.log(step, {"cpu/trainer": 1.5, "cpu/sandbox": 0.25, "reward/mean": step / 10})


def test_a_killed_run_shows_what_its_files_say(tmp_path: Path) -> None:
    folder = run(tmp_path)
    trained(folder, 4)
    evaluate(folder, "before", 2, 0.3)
    shown = show_run(folder)
    assert shown["finished"] is False
    assert shown["step"] == 4
    assert shown["metrics"]["reward/mean"] == 0.4
    assert shown["stages"] == [
        {"name": "cold", "kind": "sft", "steps": 2, "done": 2, "ended": None},
        {"name": "stage1", "kind": "rl", "steps": 3, "done": 2, "ended": None},
    ]
    summary = shown["summary"]
    assert summary["accuracy_before"] == figure(0.3)
    assert summary["accuracy_after"] is None
    assert summary["greedy_before"] is None
    assert summary["cpu_seconds"] == {"trainer": 6.0, "sandbox": 1.0}
    assert cpu_seconds([{"cpu/trainer": 1.0}, {"cpu/trainer": None, "cpu/sandbox": 0.5}]) == {
        "trainer": 1.0,
        "sandbox": 0.5,
    }
    assert shown["transcripts"] == {"before": {"problem_id": "p", "text": "before", "verdict": "right"}, "after": None}
    json.dumps(shown, allow_nan=False)


def test_a_run_killed_before_its_first_step_shows_its_identity_and_a_finished_one_the_summary_it_wrote(
    tmp_path: Path,
) -> None:
    folder = run(tmp_path)
    shown = show_run(folder)
    assert (shown["name"], shown["step"], shown["evals"], shown["metrics"]) == ("tiny", 0, [], {})
    assert [stage["done"] for stage in shown["stages"]] == [0, 0] and shown["finished"] is False
    write_json(folder.summary, {"accuracy_after": figure(0.98), "cpu_seconds": {"sft": 60.0}})
    shown = show_run(folder)
    assert shown["finished"] is True
    assert shown["summary"] == {"accuracy_after": figure(0.98), "cpu_seconds": {"sft": 60.0}}


def test_the_summary_has_every_figure_before_and_after(tmp_path: Path) -> None:
    folder = run(tmp_path)
    evaluate(folder, "before", 2, 0.3, greedy=figure(0.1))
    evaluate(folder, "after", 3, 0.8)
    evaluate(folder, "after", 5, 0.97, tool_error_share_in_correct=0.05)
    shown = show_run(folder)
    assert [(e["name"], e["step"]) for e in shown["evals"]] == [("before", 2), ("after", 3), ("after", 5)]
    assert "transcripts" not in shown["evals"][0]
    summary = shown["summary"]
    assert summary["accuracy_after"] == figure(0.97)
    assert summary["greedy_before"] == figure(0.1)
    assert (summary["tool_error_share_in_correct_before"], summary["tool_error_share_in_correct_after"]) == (0.25, 0.05)
    assert (summary["no_tool_share_before"], summary["tokens_after"]) == (0.1, 23.5)
    assert summary == summary_of(folder.evaluations(), [])


def test_a_torn_evaluation_is_told_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path)
    for name, text in (("before", '{"accuracy": nul'), ("after", "{}")):
        folder.evaluation(name, 0).mkdir(parents=True)
        (folder.evaluation(name, 0) / "result.json").write_text(text)
    assert [show_run(folder)["evals"] for _ in range(2)] == [
        [{"evaluation": "tiny/after@0", "name": "after", "step": 0}]
    ] * 2
    (torn,) = capsys.readouterr().err.splitlines()
    assert (
        torn.startswith("warning: ") and "result.json does not hold a JSON object, so this evaluation is left" in torn
    )


def test_transcripts_are_of_one_problem_that_was_wrong_and_became_right() -> None:
    def attempt(problem: str, verdict: str) -> dict[str, str]:
        return {"problem_id": problem, "verdict": verdict}

    before = {"transcripts": [attempt("a", "right"), attempt("b", "wrong"), attempt("c", "wrong")]}
    after = {"transcripts": [attempt("c", "right"), attempt("a", "right"), attempt("b", "wrong")]}
    assert paired_transcripts(before, after) == {"before": attempt("c", "wrong"), "after": attempt("c", "right")}
    assert paired_transcripts({"transcripts": ["x"]}, {}) == {"before": "x", "after": None}


def test_a_run_that_an_error_ended_says_so_until_it_goes_on(tmp_path: Path) -> None:
    folder = run(tmp_path)
    trained(folder, 3)
    assert (state_of(folder), show_run(folder)["reason"]) == ("stopped", None)
    note_failure(folder, "the sandbox is gone")
    shown = show_run(folder)
    assert (shown["state"], shown["reason"]) == ("failed", "the sandbox is gone")
    with RunTracker(folder) as tracker:
        tracker.event("resumed", step=3)
    assert (state_of(folder), show_run(folder)["reason"]) == ("stopped", None)
    with folder.locked():
        assert state_of(folder) == "running"
    write_json(folder.summary, {})
    assert state_of(folder) == "finished"
