"""Stages that end by rule or by hand, and branches: whole runs of a tiny recipe through the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import (
    AS_PLAIN,
    COLD_STEPS,
    PLAIN_STEPS,
    Command,
    Ended,
    attempts,
    begun,
    metrics,
    plain_run,
    results,
    stage_ends,
    workplace,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return begun(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    return plain_run(tmp_path_factory.getbasetemp())


def test_a_stage_ends_by_its_rule_and_the_run_says_so(plain: tuple[Path, Ended]) -> None:
    """That a run killed around it takes the same decision is in tests/test_train.py."""
    folder, ended = plain
    assert ended.code == 0, ended.told
    assert [(name, steps) for name, steps, _ in stage_ends(folder)] == [
        ("cold", COLD_STEPS),
        ("stage1", 2),
        ("stage3", 3),
    ]
    assert "stage1 is over after 2 of at most 4 steps: the mean reward of its last 1 step" in ended.told
    shown = json.loads(Command.start(folder, "runs", "show", "tiny", "--json").wait().out)
    assert [(stage["done"], bool(stage["ended"])) for stage in shown["stages"]] == [(2, True), (2, True), (3, True)]
    assert sorted(results(folder)) == [
        "evals/after/step=000007/result.json",
        "evals/before/step=000002/result.json",
        "evals/during/step=000004/result.json",
        "evals/during/step=000006/result.json",
    ]
    files = {file.name for file in (folder / "runs" / "tiny" / "evals").rglob("*") if file.is_file()}
    assert files == {"result.json", "samples.parquet", "greedy.parquet"}, (
        "nothing is left of what a killed evaluation is resumed from"
    )
    limits = {Path(name).parts[1:3]: found["setup"]["max_response_tokens"] for name, found in results(folder).items()}
    assert [place for place, most in limits.items() if most != 48] == [("during", "step=000004")], "stage1's own"


FOR_LONG = ("stage.stage1.steps=500", "stage.stage3.steps=0", "evaluate.problems=0")


def test_a_person_ends_a_stage(start: tuple[str, ...], tmp_path: Path) -> None:
    folder = workplace(tmp_path / "w")
    command = Command.start(folder, "train", "tiny.toml", *start, *FOR_LONG)

    def ask() -> None:
        asked = Command.start(folder, "runs", "end-stage", "tiny").wait()
        assert asked.code == 0, asked.told

    ended = command.after_step(COLD_STEPS + 1, ask)
    assert ended.code == 0, ended.told
    (name, steps, reason) = stage_ends(folder)[1]
    assert (name, reason) == ("stage1", "a person requested it") and steps < 500
    (folder / "runs" / "tiny" / "summary.json").unlink()  # as while the run still evaluates
    assert not (folder / "runs" / "tiny" / "end_stage").exists(), "else a resumed stage would end again"
    refused = Command.start(folder, "runs", "end-stage", "tiny").wait()
    assert refused.code == 2 and "no stage under way" in refused.told


def test_a_branch_goes_on_from_a_stage_and_leaves_the_run_as_it_is(plain: tuple[Path, Ended], tmp_path: Path) -> None:
    folder = shutil.copytree(plain[0], tmp_path / "w")

    def recorded() -> dict[Path, bytes]:
        kinds = ("metrics.jsonl", "result.json", "*.parquet", "model.safetensors")
        return {path: path.read_bytes() for kind in kinds for path in (folder / "runs" / "tiny").rglob(kind)}

    before = recorded()
    branch = ("train", "--branch", f"tiny@{COLD_STEPS + 2}")
    ended = Command.start(folder, *branch, "run.name=second").wait()
    assert ended.code == 0, ended.told
    assert metrics(folder, "second") == metrics(folder)
    states = [folder / "runs" / name / "checkpoints" / f"step={PLAIN_STEPS:06d}" for name in ("tiny", "second")]
    mine, theirs = (json.loads((state / "state.json").read_text())["policy_version"] for state in states)
    assert mine == theirs, "updates are counted on where no learner's state is restored"
    pools = (folder / "runs" / name / "pools" / "stage3.json" for name in ("tiny", "second"))
    assert not os.path.samefile(*pools), "the problems of a stage that had not begun are chosen again"
    assert ended.told.count("during: evaluation") == 1, "that of the branch's own first step was made already"
    assert recorded() == before
    identity: dict[str, Any] = json.loads((folder / "runs" / "second" / "run.json").read_text())
    assert identity["branched_from"] == {"run": str((folder / "runs" / "tiny").resolve()), "step": COLD_STEPS + 2}


def test_a_run_that_is_given_more_steps_makes_the_numbers_of_one_that_had_them_from_the_start(
    plain: tuple[Path, Ended], start: tuple[str, ...], tmp_path: Path
) -> None:
    """Killed where its second part begins, too."""
    whole, folder = plain[0], workplace(tmp_path / "w")
    short = (*AS_PLAIN, "stage.stage1.steps=1", "stage.stage3.steps=0")
    first = Command.start(folder, "train", "tiny.toml", *start, *short).wait()
    assert first.code == 0, first.told
    more = ("train", "--resume", "tiny", "stage.stage1.steps=4", "stage.stage3.steps=3")
    command = Command.start(folder, *more)
    assert command.after_step(COLD_STEPS + 2, command.process.kill).code == -signal.SIGKILL
    ended = Command.start(folder, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told
    assert metrics(folder) == metrics(whole)
    assert attempts(folder) == attempts(whole)
    theirs, ours = results(whole), results(folder)
    assert ours.keys() - theirs.keys() == {f"evals/after/step={COLD_STEPS + 1:06d}/result.json"}
    told = f"after step {COLD_STEPS + 1}: stage.stage1.steps = 4 (before it 1)"
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
    command = Command.start(folder, "train", "tiny.toml", *given)
    assert command.after_step(3, command.process.kill).code == -signal.SIGKILL
    ended = Command.start(folder, "train", "--resume", "tiny").wait()
    assert ended.code == 0 and told in ended.told, ended.told
    assert re.search("going on after step 2; steps? 3 .* made again: the last checkpoint is of step 2", ended.told)
    (cold, *_) = json.loads((folder / "runs" / "tiny" / "config.resolved.json").read_text())["stage"]
    assert (cold["steps"], cold["epochs"]) == (2, 0) and "epochs 1 of 18 rows" not in ended.told
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5]
    assert {row["question"][:5] for row in attempts(folder)} == {"Add 2", "Add 3", "Add 4", "Add 5"}
