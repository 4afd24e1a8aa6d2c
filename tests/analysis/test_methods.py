"""Several runs of one method as one curve, on the command line and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.analysis.methods import curve, method_of
from rocstar.cli.main import run
from rocstar.errors import ConfigError
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from tests.analysis.rows import attempt, turn, written


def made_run(runs: Path, name: str, failed: dict[int, int]) -> None:
    """failed: step -> how many of its four right attempts have a failed call before the one that works."""
    made = RunFolder(runs / name)
    made.path.mkdir(parents=True)
    write_json(made.path / "run.json", {"name": name})
    write_json(made.resolved, {"data": {}, "stage": []})
    made.metrics.touch()
    for step, count in failed.items():
        turns = [[turn("x", "NameError: x\n"), turn("1")] if n < count else [turn("1")] for n in range(4)]
        written(made.rollout_file(step), [attempt(some, index=n) for n, some in enumerate(turns)], step=step)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made_run(tmp_path, "a-1", {1: 4, 2: 4})
    made_run(tmp_path, "a-2", {1: 4, 2: 1, 3: 1})
    made_run(tmp_path, "b-1", {1: 0, 2: 0})
    return tmp_path


def test_runs_of_one_method_are_one_curve_with_its_range(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["A=a-1,a-2", "B (one)=b-1", "--runs", str(runs)]
    assert run(["analyze", *names, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["method"], one["runs"]) for one in told["methods"]] == [("A", ["a-1", "a-2"]), ("B (one)", ["b-1"])]
    first, second, third = told["methods"][0]["curves"]["failed_call_share_in_right"]
    assert (first["mean"], first["lowest"], first["highest"], first["runs"]) == (0.5, 0.5, 0.5, 2)
    assert (second["lowest"], second["highest"]) == (0.2, 0.5) and second["mean"] == pytest.approx(0.35)
    assert (third["step"], third["runs"]) == (3, 1)
    assert run(["analyze", *names]) == 0
    shown = capsys.readouterr().out
    assert "35.0% (20.0% to 50.0%)" in shown and "A 2, B (one) 1" in shown
    assert shown.count("attempts, 100.0% right") == 1  # the method of one run has its page


def test_curves_of_methods_are_drawn(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(["analyze", "A=a-1,a-2", "--runs", str(runs), "--pictures", str(runs / "p")]) == 0
    assert [file.name for file in (runs / "p").iterdir()] == ["fig4.png"]


def test_what_is_no_label_is_a_name(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    (runs / "step=000001.parquet").touch()
    for name in ("last", "step=000001.parquet", "runs/r/evals/after/step=000450"):
        assert method_of(name) == (name, (name,))
    assert method_of("GRPO=a/step=1,b") == ("GRPO", ("a/step=1", "b"))


@pytest.mark.parametrize("argument", ["=a", "A=", "A=a,,b", "A=a,a"])
def test_a_method_without_label_or_runs_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="is no LABEL=NAME,NAME"):
        method_of(argument)


@given(st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=4))
def test_a_mean_lies_in_its_range_and_every_value_counts(rows: list[list[float]]) -> None:
    def values(report: Any) -> list[tuple[int, float]]:
        return list(enumerate(report["row"]))

    points = curve([{"row": row} for row in rows], values)
    assert [point["step"] for point in points] == list(range(max(map(len, rows))))
    assert sum(point["runs"] for point in points) == sum(map(len, rows))
    assert all(point["lowest"] - 1e-9 <= point["mean"] <= point["highest"] + 1e-9 for point in points)
