"""One name for an evaluation: shown everywhere, taken everywhere; and the same steps of two runs against each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rocstar.analysis.sources import find_source
from rocstar.cli.main import run
from rocstar.errors import ConfigError
from rocstar.record.evaluations import find_evaluation, label_of, list_evaluations
from rocstar.record.folder import RunFolder
from rocstar.view.sources import Library
from tests.commands import json_of
from tests.evaluation.test_compare import A, B, evaluation
from tests.record.examples import run as new_run

HASH = "e302770f"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models on one benchmark, a run with evaluations at two steps, and a run that is called as a model is."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for model, right in (("weak", A), ("strong", B)):
        evaluation(runs / "evals" / model / f"aime24-{HASH}", right, model=model)
    evaluation(runs / "evals" / "Qwen_Qwen3-14B" / "bfcl-00000000", A)
    made = new_run(runs, "first")
    for name, step, right in (("after", 12, A), ("after", 6, A), ("math-1", 6, A), ("math-2", 6, A)):
        evaluation(made.evaluation(name, step), right)
    evaluation(new_run(runs, "weak").evaluation("after", 3), A)
    return runs


def of_run(base: Path, name: str, step: int) -> Path:
    return RunFolder(base / "first").evaluation(name, step)


def test_every_name_that_is_listed_is_taken(base: Path) -> None:
    listed = list_evaluations(base)
    assert sorted(one.label for one in listed) == [
        "Qwen_Qwen3-14B/bfcl-00000000", "first/after@12", "first/after@6", "first/math-1@6", "first/math-2@6",
        f"strong/aime24-{HASH}", "weak/after@3", f"weak/aime24-{HASH}",
    ]  # fmt: skip
    for one in listed:
        assert find_evaluation(one.label, base).resolve() == one.folder.resolve()
        assert label_of(one.folder, base) == find_source(one.label, base).name == one.label
        assert Library.open(one.label, base).first.startswith("/eval/")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("weak/aime24", f"weak/aime24-{HASH}"),
        (f"weak:aime24-{HASH}", f"weak/aime24-{HASH}"),  # as the page says it
        (f"runs/evals/weak/aime24-{HASH}", f"weak/aime24-{HASH}"),
        ("Qwen/Qwen3-14B/bfcl", "Qwen_Qwen3-14B/bfcl-00000000"),
        ("str/ai", f"strong/aime24-{HASH}"),
        ("first/after", "first/after@12"),
        ("first/after@6", "first/after@6"),
        ("runs/first/after", "first/after@12"),
        ("weak/after", "weak/after@3"),
        ("weak/a@3", "weak/after@3"),
    ],
)
def test_old_and_short_spellings_are_taken(base: Path, typed: str, meant: str) -> None:
    assert label_of(find_evaluation(typed, base), base) == meant
    assert find_source(typed, base).name == meant


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("weak/a", f"weak/a may be any of weak/after@3, weak/aime24-{HASH}; write more of the name"),
        ("first/math", "first/math may be any of first/math-1@6, first/math-2@6; write more of the name"),
        ("first/gsm8k", "there is no evaluation first/gsm8k; there are: first/after@6, first/math-1@6"),
        ("first/after@7", "there is no evaluation first/after@7; there are: first/after@6"),
        ("weak:after", f"there is no evaluation weak:after; there are: weak/aime24-{HASH}"),
        ("first:after", "there is no evaluation first:after; there are: first/after@6"),  # a run's, so not by `:`
        ("nosuch/after", "there is no run nosuch"),
    ],
)
def test_what_a_name_may_mean_is_said(base: Path, typed: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_evaluation(typed, base)
    assert told in str(refused.value)


def test_two_models_with_one_name_are_told_apart_by_what_is_theirs(base: Path) -> None:
    """A run and a model folder may both be called weak and hold evaluations of one name."""
    evaluation(RunFolder(base / "weak").evaluation(f"aime24-{HASH}", 3), A)
    with pytest.raises(ConfigError, match=f"may be any of weak/aime24-{HASH}@3, weak/aime24-{HASH};"):
        find_evaluation("weak/aime24", base)
    assert find_evaluation("weak/aime24@3", base).name == "step=000003"
    assert find_evaluation("weak:aime24", base).parent.name == "weak"


def test_the_list_is_a_table_and_an_object(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "evals" / "weak" / "broken").mkdir()
    (base / "evals" / "weak" / "broken" / "result.json").write_text("[]")
    assert run(["evals", "list", "--runs", str(base)]) == 0
    table = capsys.readouterr().out
    assert f"weak/aime24-{HASH}" in table and re.search(r"first/after@12 .* @6\b", table)
    assert "first/after@6" not in table and "cannot be read" in table
    rows = {row["evaluation"]: row for row in json_of(capsys, "evals", "list", "--runs", str(base))["evaluations"]}
    assert rows["first/after@6"]["step"] == 6 and rows["weak/broken"]["broken"]
    assert rows[f"weak/aime24-{HASH}"]["model"] == "weak" and rows[f"weak/aime24-{HASH}"]["attempts"] == 2


def test_a_run_shows_its_evaluations_by_their_names(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "show", "first", "--runs", str(base)]) == 0
    assert "first/math-1@6" in capsys.readouterr().out
    shown = json_of(capsys, "runs", "show", "first", "--runs", str(base))["evals"]
    assert [one["evaluation"] for one in shown][-1] == "first/after@12"


def test_names_of_any_kind_are_compared_and_shown(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "weak/aime24", f"strong:aime24-{HASH}"]) == 0
    shown = capsys.readouterr().out
    assert f": weak/aime24-{HASH}\n" in shown and f": strong/aime24-{HASH}\n" in shown and "B - A +25.0%" in shown


def compared(capsys: pytest.CaptureFixture[str], base: Path, *more: str) -> Any:
    assert run(["runs", "compare", "a", "b", "--runs", str(base), *more]) == 0
    return capsys.readouterr().out


def test_runs_are_compared_at_the_last_step_that_both_were_evaluated_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, steps in (("a", (2, 4, 12)), ("b", (2, 4, 6))):
        made = new_run(tmp_path, name)
        for step in steps:
            evaluation(made.evaluation("during", step), A if name == "a" or step == 2 else B)
        evaluation(made.evaluation("after", steps[-1]), A if name == "a" else B)
    shown = compared(capsys, tmp_path)
    assert "during, step 4: 37.5% -> 62.5%" in shown
    assert "after, A at step 12, B at step 6: 37.5% -> 62.5%" in shown
    rows = {row["name"]: row for row in json.loads(compared(capsys, tmp_path, "--json"))["evaluations"]}
    assert (rows["during"]["step_a"], rows["during"]["step_b"]) == (4, 4)
    assert (rows["after"]["step_a"], rows["after"]["step_b"]) == (12, 6)
    assert rows["after"]["a"]["evaluation"] == "a/after@12"
