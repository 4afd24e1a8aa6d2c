"""Stages that end by rule or by hand, and branches: whole runs of a tiny recipe through the command line."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.tree import flat
from rocstar.record.journal import read_journal
from tests.tiny_run import COLD_STEPS, Command, Ended, attempts, begun, metrics, plain_run, results, run_once, workplace

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

RULES = (
    "stage.stage1.end.window=1",
    "stage.stage1.end.reward_gain=1",
    "evaluate.every_steps=2",
    "learning.top_entropy_share=0.5",
)


def run_of(folder: Path, name: str = "tiny") -> Path:
    return folder / "runs" / name


def ends(folder: Path, name: str = "tiny") -> list[tuple[str, int, str]]:
    events = read_journal(run_of(folder, name) / "events.jsonl")
    return [(e["name"], e["steps"], e["reason"]) for e in events if e["event"] == "stage_end"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return begun(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def finished(start: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Its first RL stage ends after two of four steps, because no reward rises by 1."""
    given = ("train", "tiny.toml", *start, *RULES)
    return run_once(tmp_path_factory.getbasetemp(), "by rule", lambda made: Command.start(made, *given).wait())


def test_a_stage_ends_by_its_rule_and_the_run_says_so(finished: tuple[Path, Ended]) -> None:
    folder, ended = finished
    assert ended.code == 0, ended.told
    assert [(name, steps) for name, steps, _ in ends(folder)] == [("cold", COLD_STEPS), ("stage1", 2), ("stage3", 3)]
    assert "stage1 is over after 2 of at most 4 steps: the mean reward of its last 1 step" in ended.told
    shown = json.loads(Command.start(folder, "runs", "show", "tiny", "--json").wait().out)
    assert [(stage["done"], bool(stage["ended"])) for stage in shown["stages"]] == [(2, True), (2, True), (3, True)]
    assert sorted(results(folder)) == [
        "evals/after/step=000007/result.json",
        "evals/before/step=000002/result.json",
        "evals/during/step=000004/result.json",
        "evals/during/step=000006/result.json",
    ]


def test_a_run_killed_around_the_end_of_a_stage_takes_the_same_decisions(
    finished: tuple[Path, Ended], start: tuple[str, ...], tmp_path: Path
) -> None:
    folder = workplace(tmp_path / "w")
    command = Command.start(folder, "train", "tiny.toml", *start, *RULES)
    for step in (COLD_STEPS + 1, COLD_STEPS + 2, COLD_STEPS + 4):
        assert command.after_step(step, command.process.kill).code == -signal.SIGKILL
        command = Command.start(folder, "train", "--resume", "tiny")
    assert command.wait().code == 0
    assert metrics(folder) == metrics(finished[0])
    assert dict(flat(results(folder))) == dict(flat(results(finished[0])))
    assert attempts(folder) == attempts(finished[0])
    assert set(ends(folder)) == set(ends(finished[0]))


def test_a_person_ends_a_stage(start: tuple[str, ...], tmp_path: Path) -> None:
    folder = workplace(tmp_path / "w")
    command = Command.start(folder, "train", "tiny.toml", *start, "stage.stage1.steps=500", "evaluate.problems=0")

    def ask() -> None:
        asked = Command.start(folder, "runs", "end-stage", "tiny").wait()
        assert asked.code == 0, asked.told

    ended = command.after_step(COLD_STEPS + 1, ask)
    assert ended.code == 0, ended.told
    (name, steps, reason) = ends(folder)[1]
    assert (name, reason) == ("stage1", "a person requested it") and steps < 500
    (folder / "runs" / "tiny" / "summary.json").unlink()  # as while the run still evaluates
    refused = Command.start(folder, "runs", "end-stage", "tiny").wait()
    assert refused.code == 2 and "no stage under way" in refused.told


def test_a_branch_goes_on_from_a_stage_and_leaves_the_run_as_it_is(finished: tuple[Path, Ended]) -> None:
    folder = finished[0]
    before = (metrics(folder), results(folder), attempts(folder))
    branch = ("train", "--branch", f"tiny@{COLD_STEPS + 2}")
    refused = Command.start(folder, *branch, "stage.cold.steps=999").wait()
    assert refused.code == 2 and "stage cold was over at step 4" in refused.told
    refused = Command.start(folder, *branch, "run.seed=4").wait()
    assert refused.code == 2 and "takes no 'run.seed=4'" in refused.told
    ended = Command.start(folder, *branch, "run.name=second").wait()
    assert ended.code == 0, ended.told
    assert metrics(folder, "second") == metrics(folder)
    assert (metrics(folder), results(folder), attempts(folder)) == before
    identity: dict[str, Any] = json.loads((run_of(folder, "second") / "run.json").read_text())
    assert identity["branched_from"] == {"run": str(run_of(folder).resolve()), "step": COLD_STEPS + 2}


def test_a_run_that_is_given_more_steps_makes_the_numbers_of_one_that_had_them_from_the_start(
    start: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed where its second part begins, too."""
    whole, folder = plain_run(tmp_path_factory.getbasetemp()), workplace(tmp_path / "w")
    first = Command.start(folder, "train", "tiny.toml", *start, "stage.stage1.steps=2", "stage.stage3.steps=0").wait()
    assert first.code == 0, first.told
    more = ("train", "--resume", "tiny", "stage.stage1.steps=4", "stage.stage3.steps=3")
    command = Command.start(folder, *more)
    assert command.after_step(COLD_STEPS + 3, command.process.kill).code == -signal.SIGKILL
    ended = Command.start(folder, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told
    assert metrics(folder) == metrics(whole)
    assert attempts(folder) == attempts(whole)
    theirs, ours = results(whole), results(folder)
    assert ours.keys() - theirs.keys() == {f"evals/after/step={COLD_STEPS + 2:06d}/result.json"}
    told = f"after step {COLD_STEPS + 2}: stage.stage1.steps = 4 (before it 2)"
    assert told in Command.start(folder, "runs", "show", "tiny").wait().out
    changed = ("stage.stage3.steps=4", "stage.stage3.learning.learning_rate=1e-5", "stage.again.kind=sft",
               "stage.again.steps=2", f"stage.again.sft.rows_file={folder / 'rows.jsonl'}")  # fmt: skip
    ended = Command.start(folder, "train", "--resume", "tiny", *changed, "stage.again.sft.warmup_steps=0").wait()
    assert ended.code == 0, ended.told
    *before, rl, _, last = metrics(folder)
    assert before == metrics(whole) and last["stage"] == "again"
    assert (rl["stage"], rl["learn/learning_rate"]) == ("stage3", 1e-5)


def test_a_run_leaves_out_long_prompts_and_counts_epochs_and_says_so(tmp_path: Path) -> None:
    """Of a model of random weights, whose tokenizer is made when the run opens; a resumed run leaves out the same."""
    folder = workplace(tmp_path / "w")
    with (folder / "train.jsonl").open("a") as train:
        train.write(json.dumps({"question": "Add 9 and 3" + " please" * 60, "answer": "12"}) + "\n")
    epochs = ("stage.cold.steps=-1", "stage.cold.epochs=1")  # 18 rows, 12 a step
    given = (*epochs, "stage.stage1.steps=3", "stage.stage3.steps=0", "evaluate.problems=0",
             "data.max_prompt_tokens=150", "run.checkpoint_seconds=1000")  # fmt: skip
    told = (
        "stage stage1: data.max_prompt_tokens leaves out 1 of 5 problems, whose prompts have more than 150 tokens: tra"
    )
    dry = Command.start(folder, "train", "tiny.toml", *given, "--dry-run").wait()
    assert told in dry.told and "stage cold: epochs 1 of 18 rows, 12 a step, are 2 steps" in dry.told
    assert "stage.cold.steps = 2  (" in dry.out
    command = Command.start(folder, "train", "tiny.toml", *given)
    assert command.after_step(3, command.process.kill).code == -signal.SIGKILL
    ended = Command.start(folder, "train", "--resume", "tiny").wait()
    assert ended.code == 0 and told in ended.told, ended.told
    assert re.search("going on after step 2; steps? 3 .* made again: the last checkpoint is of step 2", ended.told)
    (cold, *_) = json.loads((run_of(folder) / "config.resolved.json").read_text())["stage"]
    assert (cold["steps"], cold["epochs"]) == (2, 0) and "epochs 1 of 18 rows" not in ended.told
    assert {row["question"][:5] for row in attempts(folder)} == {"Add 2", "Add 3", "Add 4", "Add 5"}
