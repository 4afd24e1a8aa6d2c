"""Sweeps: which runs settings make, what they came to over seeds, and going on after a failure and after Ctrl-C."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from rocstar.analysis.sweep import came_to, carry_out, planned, swept_runs, values_of
from rocstar.cli import main as cli
from rocstar.config.recipe import load_recipe
from rocstar.errors import ConfigError
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.support import exits
from tests.commands import json_of
from tests.tiny_run import GLANCE, RECIPE, ROCSTAR_WITH, Command, workplace
from tests.tutorials.session import commands

LISTS = 'data.families=["gcd","fib"],["powmod"]'
SHORT = ("stage.cold.steps=3", "stage.stage1.steps=1", "stage.stage3.steps=0", "evaluate.problems=0")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.replace('"runs"', json.dumps(str(tmp_path / "runs"))))
    return str(path)


def carried_out(recipe: str, *settings: str, accuracies: tuple[float, ...] = ()) -> list[RunFolder]:
    """The runs of a sweep as folders; as many as there are accuracies are finished, each 0.1 better after RL."""
    made = [RunFolder.create(one.recipe, one.recipe.run.folder, []) for one in planned(recipe, settings)]
    for run, accuracy in zip(made, accuracies, strict=False):
        for name, step, value in (("before", 1, accuracy - 0.1), ("after", 2, accuracy)):
            run.evaluation(name, step).mkdir(parents=True)
            result = {"accuracy": {"value": value, "interval": [0, 1], "n": 9}, "mean_response_tokens": 8.0}
            write_json(run.evaluation(name, step) / "result.json", result)
        write_json(run.summary, {})
    return made


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1e-6,3e-6", ["a.b=1e-6", "a.b=3e-6"]),
        ("run.seed=0..2", ["run.seed=0", "run.seed=1", "run.seed=2"]),
        ("run.seed=-1..0,7", ["run.seed=-1", "run.seed=0", "run.seed=7"]),
        (LISTS, ['data.families=["gcd","fib"]', 'data.families=["powmod"]']),
        ('a.b="x,y", z', ['a.b="x,y"', "a.b=z"]),
        ("a.b=../one.jsonl,o'brien.jsonl,x", ["a.b=../one.jsonl", "a.b=o'brien.jsonl", "a.b=x"]),
        ("a.b = none", ["a.b=none"]),
        ("a.b=", ["a.b="]),
    ],
)
def test_values_are_split_at_commas_outside_quotes_and_brackets(text: str, values: list[str]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["run.seed=2..0"], r"2\.\.0 is no range"),
        (["run.seed=0..99999999"], "is no range"),
        (["run.seed=0,,1"], "an empty value, or one twice"),
        (["run.seed=1,0..2"], "an empty value, or one twice"),
        (["run.seed"], "is not of the form"),
        (["run.seed=0", "run.seed=1"], "run.seed is given twice"),
        (["run.name=a,b"], "run.name can't be swept"),
        (["run.folder=a,b"], "run.folder can't be swept"),
        (["run.sweep=x"], "run.sweep can't be swept"),
        (["run.seeds=1,2"], "run.seed"),
        (["rollout.top_p=0.5,7"], "top_p"),
        (["run.seed=0..999", "rollout.max_turns=2,3"], "make 2000 runs"),
    ],
)
def test_settings_that_make_no_sweep_are_refused(recipe: str, settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        planned(recipe, settings)


def test_runs_are_all_combinations_and_are_named_after_what_differs(recipe: str) -> None:
    made = planned(recipe, ["learning.learning_rate=1e-6,3e-6", "run.seed=0..1", "rollout.max_turns=2", "run.name=try"])
    assert [one.recipe.run.name for one in made] == [
        f"try-learning_rate={rate}-seed={seed}" for rate in ("1e-6", "3e-6") for seed in (0, 1)
    ]
    chosen = {(o.recipe.learning.learning_rate, o.recipe.run.seed, o.recipe.rollout.max_turns) for o in made}
    assert chosen == {(1e-6, 0, 2), (1e-6, 1, 2), (3e-6, 0, 2), (3e-6, 1, 2)}
    assert {one.recipe.run.sweep for one in made} == {"try"}


def test_names_differ_where_values_that_are_no_file_names_look_alike(recipe: str) -> None:
    settings = ["data.train_files=a/b.jsonl,a_b.jsonl,a//b.jsonl", "stage.stage1.steps=1,2", "stage.stage3.steps=1,2"]
    names = {one.recipe.run.name for one in planned(recipe, settings)}
    assert len(names) == 12 and not any("/" in name for name in names)
    assert any("stage.stage1.steps=1-stage.stage3.steps=2" in name for name in names)


def test_a_run_of_that_name_with_other_settings_is_not_taken_for_one_of_the_sweep(recipe: str) -> None:
    carried_out(recipe, "run.seed=0,1")
    planned(recipe, ["run.seed=0..2"])  # more seeds of the same sweep
    with pytest.raises(ConfigError, match=r"rollout\.max_turns = 3, not 2; .* run\.name=NAME"):
        planned(recipe, ["run.seed=0,1", "rollout.max_turns=2"])
    RunFolder.create(load_recipe(recipe, ["run.name=tiny-seed=5", "run.seed=5"]), Path(recipe).parent / "runs", [])
    with pytest.raises(ConfigError, match=r'run\.sweep = null, not "tiny"'):
        planned(recipe, ["run.seed=5,6"])


def test_a_folder_without_a_run_is_refused_and_no_second_run_made_beside_it(recipe: str) -> None:
    first, second = planned(recipe, ["run.seed=0,1"])
    assert (first.state, second.state) == ("new", "new")
    second.folder.path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"seed=1 exists and holds no run, .*; delete it"):
        _ = second.state
    assert first.state == "new"


def test_figures_of_finished_runs_are_told_over_seeds(recipe: str) -> None:
    values = (0.5, 0.6, 0.7)
    carried_out(recipe, "rollout.max_turns=2,3", "run.seed=0..2", accuracies=(*values, 0.9))
    found = came_to("tiny", swept_runs("tiny", Path(recipe).parent / "runs"))
    two, three = found["settings"]
    assert (two["settings"], two["finished"], len(three["runs"])) == ({"rollout.max_turns": 2}, 3, 3)
    figures = {(one["evaluation"], one["figure"]): one for one in two["figures"]}
    after = figures["after", "accuracy"]
    half = 4.302653 * stdev(values) / 3**0.5  # Student, 2 degrees of freedom: from a printed table
    assert after["mean"] == pytest.approx(fmean(values)) and after["range"] == [0.5, 0.7]
    assert after["interval"] == pytest.approx([fmean(values) - half, fmean(values) + half], abs=1e-5)
    assert after["values"] == {f"tiny-max_turns=2-seed={seed}": value for seed, value in enumerate(values)}
    assert figures["gain", "accuracy"]["mean"] == pytest.approx(0.1)
    assert figures["after", "tokens"]["interval"] is None  # the same in all: how they spread is not known
    assert three["finished"] == 1 and three["figures"][0]["interval"] is None


def test_lists_show_which_runs_are_of_one_sweep(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    carried_out(recipe, "run.seed=0..1", accuracies=(0.5,))
    base = str(Path(recipe).parent / "runs")
    assert cli.run(["runs", "list", "--runs", base]) == exits.OK
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines() if "tiny" in line or "run " in line)
    assert head[:2] == ["run", "sweep"] and [row[:2] for row in rows] == [[f"tiny-seed={n}", "tiny"] for n in (0, 1)]
    assert cli.run(["runs", "sweep", "tiny", "--runs", base]) == exits.OK
    assert "1 of 2" in (shown := capsys.readouterr().out) and "50.0%" in shown
    assert cli.run(["runs", "sweep", "none", "--runs", base]) == exits.USAGE
    assert "there are tiny" in capsys.readouterr().err


def test_a_dry_run_lists_what_there_is_to_do(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    carried_out(recipe, "run.seed=0..1", accuracies=(0.5,))
    listed = json_of(capsys, "sweep", recipe, "run.seed=0..2", "--dry-run")["runs"]
    assert [row["state"] for row in listed] == ["finished", "stopped", "new"]
    assert cli.run(["sweep", recipe, "run.seed=0..2", "--dry-run", "--only", "2"]) == exits.OK
    assert "tiny-seed=2" in capsys.readouterr().out
    assert cli.run(["sweep", recipe, "run.seed=0..2", "--only", "3"]) == exits.USAGE


@pytest.mark.usefixtures("own_ctrl_c")
def test_signals_end_a_sweep_once_its_run_has_ended_and_a_failure_does_not() -> None:
    def child(program: str) -> int:
        return carry_out([sys.executable, "-c", f"import os, signal, sys, time; {program}"])

    assert child("sys.exit(3)") == 3
    for handed_on in ("SIGTERM", "SIGHUP"):
        with pytest.raises(KeyboardInterrupt):
            child(f"os.kill(os.getppid(), signal.{handed_on}); time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        child("os.kill(os.getppid(), signal.SIGINT); sys.exit(0)")
    with pytest.raises(KeyboardInterrupt):
        child("sys.exit(130)")


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped_and_a_failed_run_loses_none(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder, act = workplace(tmp_path / "work"), ROCSTAR_WITH
    arguments = [f"{commands()}/python", "sweep", "tiny.toml", "data.train_files=late.jsonl,train.jsonl", *SHORT]
    names = [f"tiny-train_files={name}.jsonl" for name in ("late", "train")]
    second = folder / "runs" / names[1]
    stopped = Command.start(folder, *arguments, act=act)
    while not (second / "metrics.jsonl").exists() and stopped.process.is_alive():
        time.sleep(GLANCE)
    stopped.interrupt()
    ended = stopped.wait()
    assert ended.code == exits.INTERRUPTED, ended.told
    assert f"run {names[0]} failed" in ended.told and "stopped in run 2 of 2" in ended.told

    shutil.copy(folder / "train.jsonl", folder / "late.jsonl")
    again = Command.start(folder, *arguments, "--json", act=act).wait()
    assert again.code == exits.OK, again.told
    found: dict[str, Any] = json.loads(again.out)
    assert [(row["finished"], len(row["runs"])) for row in found["settings"]] == [(1, 1), (1, 1)]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    assert Command.start(folder, *arguments, act=act).wait().code == exits.OK
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == before
