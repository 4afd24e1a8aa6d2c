"""What a person sees while a run goes on and when it is over."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest

from rocstar.cli import main as cli
from rocstar.support.pace import time_left
from rocstar.support.screen import STEP_LINE, Screen, plural, share, small, step_line, transcript
from tests.scripted import Clock

METRICS = {
    "reward/mean": 0.413,
    "pass/mean": 0.41,
    "roc/kept": 96.0,
    "roc/attempts": 192.0,
    "tool/calls": 1.2,
    "tool/error_rate": 0.09,
    "len/tokens": 23.0,
    "len/truncated": 0.03,
    "policy/entropy": 0.41,
    "policy/logprob_gap": 1e-6,
    "step/tokens_per_second": 2345.6,
    "step/trainer_cpu_seconds": 1.9,
    "cpu/sandbox": 0.6,
    "something/else": 3.0,
}
LINE = (
    "stage1 step 12/20  reward .413  pass .41  kept 96/192  calls 1.2 err 9%  tokens 23 cut 3%  entropy .41  gap 1e-6"
    "  2346 tokens/s  trainer 1.9s sandbox 0.6s"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screens(progress: io.StringIO | None = None) -> tuple[Screen, io.StringIO, io.StringIO]:
    progress, results = progress or io.StringIO(), io.StringIO()
    return Screen(progress=progress, results=results), progress, results


def test_the_step_line_has_its_fixed_order() -> None:
    assert step_line("stage1", 12, 20, METRICS) == LINE
    assert step_line("stage1", 12, 20, dict(reversed(METRICS.items()))) == LINE
    more = {"refill/groups": 3.0}
    assert "kept 96/192 refilled 3  calls" in step_line("stage1", 12, 20, {**METRICS, **more})


def test_the_page_explains_every_metric_of_the_step_line() -> None:
    page = (Path(__file__).parent.parent / "docs" / "run-folder.md").read_text()
    assert [metric for _, metric, _ in STEP_LINE if f"`{metric}`" not in page] == []


def test_a_metric_that_a_step_does_not_have_is_left_out() -> None:
    assert step_line("cold", 1, 9, {"loss": 1.25, "reward/mean": None}) == "cold step 1/9  loss 1.250"


def test_numbers_are_short_and_never_wrong() -> None:
    shown = [share(value) for value in (0.41, 10.05, -0.5, 1.0, 0.0, 1e300)]
    assert shown == [".41", "10.05", "-.50", "1.00", ".00", "1e+300"]
    assert [small(value) for value in (1e-6, 0.0, 0.25)] == ["1e-6", "0", "2e-1"]


def test_elsewhere_than_on_a_terminal_each_step_is_a_plain_line() -> None:
    screen, progress, results = screens()
    with screen:
        screen.stage("stage1", "reinforcement learning, 20 steps")
        screen.step("stage1", 12, 20, METRICS)
        screen.note("saved")
    assert progress.getvalue() == f"stage1: reinforcement learning, 20 steps\n{LINE}\nsaved\n"
    assert results.getvalue() == ""


@pytest.mark.parametrize("then", ["a note", "a stage", "the end"])
def test_the_last_line_before_something_else_is_always_printed(then: str) -> None:
    screen, progress, _ = screens()
    with screen:
        for step in (10, 11, 12):
            screen.step("stage1", step, 20, METRICS)
        if then != "the end":
            (screen.note if then == "a note" else screen.stage)(then)
    lines = progress.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["stage1 step 10/20", "stage1 step 12/20"]
    assert lines[2:] == ([then] if then != "the end" else [])


def test_an_evaluation_says_how_far_it_is() -> None:
    screen, progress, _ = screens()
    for done in (1, 2, 3):
        screen.attempted("sampled", done, 3, 0.25)
    assert progress.getvalue() == "sampled 1/3 problems  right .25\nsampled 3/3 problems  right .25\n"
    screen.attempted("greedy", 3, 3, nan)  # of an endpoint that is gone
    assert progress.getvalue().endswith("greedy 3/3 problems  none judged\n")


@pytest.mark.parametrize(
    ("steps", "total", "expected", "seconds", "left"),
    [
        (range(1, 6), 20, None, 30.0, "about 8 min left"),
        (range(1, 5), 20, 10, 30.0, "about 3 min left"),  # of a stage that will end before its steps: to its end
        (range(101, 105), 200, None, 10.0, "about 16 min left"),  # of a run that goes on: by what it did itself
    ],
)
def test_the_time_left_is_said_after_three_steps_and_follows_the_clock(
    steps: range, total: int, expected: int | None, seconds: float, left: str
) -> None:
    progress, clock = io.StringIO(), Clock()
    screen = Screen(progress=progress, clock=clock)
    for step in steps:
        clock.now += seconds
        screen.step("stage1", step, total, {"step/seconds": seconds}, expected=expected)
    told = [line.partition(", ")[2] for line in progress.getvalue().splitlines()]
    assert told[:2] == ["", ""] and all(told[2:]) and told[-1] == left


@pytest.mark.parametrize(
    ("least", "most", "told"),
    [(0.6, 1.4, "about 1 s"), (0.2, 1.4, "0 to 1 s"), (70, 115, "70 to 115 s"), (100, 125, "about 2 min")],
)
def test_a_span_of_one_number_is_told_as_that(least: float, most: float, told: str) -> None:
    assert time_left((least, most)) == f", {told} left"


def test_an_uneven_pace_is_told_as_a_span() -> None:
    progress, clock = io.StringIO(), Clock()
    screen = Screen(progress=progress, clock=clock)
    for done, seconds in enumerate((1.0, 1.0, 1.0, 9.0, 9.0, 9.0), start=1):  # quick ones end first
        clock.now += seconds
        screen.attempted("sampled", done, 16, 0.5)
    assert progress.getvalue().splitlines()[-1] == "sampled 6/16 problems  right .50, 50 to 90 s left"


def test_a_log_is_never_silent_for_long_and_hears_nothing_twice() -> None:
    progress, clock = io.StringIO(), Clock()
    screen = Screen(progress=progress, clock=clock)
    screen.stage("cold start", "model")
    for _ in range(25):
        clock.now += 1.0
        screen.look(lambda: f"cold start for {clock.now:.0f} s")
    assert progress.getvalue().splitlines() == ["cold start: model", "cold start for 10 s", "cold start for 20 s"]


def test_what_a_step_line_will_say_is_kept_back_unless_a_log_waits_for_long() -> None:
    progress, clock = io.StringIO(), Clock()
    screen = Screen(progress=progress, clock=clock)
    screen.note("begin")
    for done in range(1, 5):
        clock.now += 4.0
        screen.counted("pool", done, 8, "problems asked")
    screen.step("stage1", 1, 1, {})
    assert progress.getvalue().splitlines() == ["begin", "pool 3/8 problems asked, about 20 s left", "stage1 step 1/1"]


def test_a_terminal_shows_a_live_line_that_stays_at_the_end_and_what_is_under_way_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside it, it was cut off where the step line fills the screen."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen, progress, _ = screens(Terminal())
    screen.step("stage1", 11, 12, METRICS)
    screen.look(lambda: "rollout for 12 s: 31 of 128 attempts done")
    assert "rollout for 12 s: 31 of 128 attempts done" in progress.getvalue()
    screen.note("a note")
    screen.step("stage1", 12, 12, METRICS)
    screen.close()
    text = progress.getvalue()
    assert "\x1b[" in text and "a note" in text and "step 12/12" in text


def test_ci_gets_plain_lines_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    screen, progress, _ = screens(Terminal())
    screen.step("stage1", 12, 20, METRICS)
    assert progress.getvalue() == LINE + "\n"


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "interval": [value - 0.05, value + 0.02], "n": 400}


def test_the_last_table_shows_before_after_intervals_seconds_and_a_transcript() -> None:
    screen, _, results = screens()
    summary = {
        "accuracy_before": figure(0.3),
        "accuracy_after": figure(0.97),
        "greedy_before": None,
        "greedy_after": figure(0.98),
        "tool_error_share_in_correct_before": 0.47,
        "tool_error_share_in_correct_after": 0.05,
        "no_tool_share_after": 0.01,
        "tokens_before": 24.2,
        "tokens_after": 23.0,
        "cpu_seconds": {"sft": 60.0, "stage1": 30.5},
    }
    before = {"question": "gcd of 4 and 6?", "text": "The answer is [bold]\\boxed{3}.", "verdict": "wrong"}
    screen.summary({"name": "tiny", "summary": summary, "transcripts": {"before": before, "after": None}})
    text = results.getvalue()
    for part in (
        "30.0% (25.0 to 32.0)",
        "97.0% (92.0 to 99.0)",
        "98.0% (93.0 to 100.0)",
        "47.0%",
        "23.0",
        "sft 60.0  stage1 30.5  (total 90.5)",
        "gcd of 4 and 6?\nThe answer is [bold]\\boxed{3}.\n[wrong]",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


STEERING = "\x1b]52;c;cm0gLXJm\x07\x1b[2J \u202eevil"


def test_nothing_that_a_model_or_a_program_says_steers_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    screen, progress, results = screens(Terminal())
    screen.note(STEERING)
    failed = {"name": "tiny", "state": "failed", "reason": STEERING, "step": 3}
    shown = {"before": {"question": "4?", "text": STEERING, "verdict": "wrong"}}
    screen.summary({**failed, "summary": {"accuracy_before": None}, "transcripts": shown})
    assert cli.run(["runs", "show", STEERING]) != 0
    tables = (screens(Terminal()), screens(Terminal()))
    tables[0][0].runs([{"name": STEERING, "broken": STEERING, "sweep": None}])
    tables[1][0].evaluations([{"evaluation": STEERING, "broken": STEERING}])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": STEERING, "answer": "1", STEERING: 1}))
    errors = capsys.readouterr().err
    cli.run(["data", "check", str(tmp_path / "rows.jsonl")])
    checked = capsys.readouterr().out
    told = (progress.getvalue(), results.getvalue(), errors, checked, *(one.getvalue() for *_, one in tables))
    assert [
        text for text in told if "evil" not in text or "\x1b]" in text or "\x1b[2J" in text or "\u202e" in text
    ] == []


def test_an_evaluation_says_how_many_attempts_are_missing_in_a_figure() -> None:
    screen, _, results = screens()
    screen.figures({"avg@4": {**figure(0.5), "missing": 1}, "pass@4": figure(0.7), "setup": {"seed": 0}})
    lines = results.getvalue().splitlines()
    assert any("avg@4" in line and line.rstrip().endswith("400, 1 attempt missing") for line in lines)
    assert any("pass@4" in line and line.rstrip().endswith(" 400") for line in lines)
    assert "seed" not in results.getvalue()


def test_a_run_that_failed_says_why_before_its_table_and_shows_none_of_nothing() -> None:
    screen, _, results = screens()
    failed = {"name": "tiny", "state": "failed", "reason": "the sandbox is gone", "step": 3}
    screen.summary({**failed, "summary": {"accuracy_before": None, "cpu_seconds": {}, "benchmarks": []}})
    assert results.getvalue() == "tiny failed after 3 steps: the sandbox is gone\n"
    screen.summary({**failed, "summary": {"accuracy_before": {"value": 0.0, "interval": [0.0, 0.1], "n": 40}}})
    table = results.getvalue().partition("tiny failed after 3 steps")[2]
    assert "right answers, sampled" in table and "right answers, greedy" not in table  # which was not asked


def test_one_step_is_no_steps() -> None:
    assert [plural(count, "step") for count in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    screen, _, results = screens()
    stage = {"name": "one", "done": 1, "steps": 1, "ended": "a person requested it"}
    screen.summary({"name": "tiny", "state": "stopped", "reason": "", "step": 1, "summary": {}, "stages": [stage]})
    told = "tiny stopped after 1 step\none ended after 1 of at most 1 step: a person requested it\n"
    assert results.getvalue() == told


def test_lines_of_a_transcript_stay_whole_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen, _, results = screens()
    line = "x = " + "1 + " * 25 + "1"
    screen.summary({"name": "tiny", "summary": {}, "transcripts": {"after": line}})
    assert line in results.getvalue().splitlines()
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    Screen(progress=io.StringIO(), results=terminal).evaluations([{"evaluation": "tiny/after@7"}])
    assert "tiny/after@7" in terminal.getvalue(), "a narrow terminal breaks the lines of a table itself"


def test_long_transcripts_are_cut_in_the_middle() -> None:
    text = transcript("\n".join(str(number) for number in range(100)))
    assert text.startswith("0\n1\n") and text.endswith("\n99") and "... 86 lines ..." in text
    assert transcript("x" * 111) == "x" * 109 + "…"


def test_a_reader_that_has_seen_enough_is_no_failure_to_talk_about() -> None:
    code = "from rocstar.cli.main import main; main()"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", code, "--version"], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
