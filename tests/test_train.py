"""Whole runs of a tiny recipe through the command line: killed, stopped, without a sandbox, and looked at afterwards.

The model (25,000 parameters) learns a dozen conversations by heart, tool calls included, so that RL sees right and
wrong attempts, failed programs and truncated ones within seconds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SFT_STEPS, RL_STEPS = 110, 7  # of RECIPE's stages
RECIPE = """\
[run]
name = "tiny"
folder = "runs"
checkpoint_seconds = 0

[model]
hidden_size = 32
num_layers = 1
num_heads = 1
num_kv_heads = 1
intermediate_size = 64
max_positions = 256
vocab_size = 320

[data]
source = "files"
train_files = ["train.jsonl"]
test_files = ["test.jsonl"]

[sft]
batch_rows = 12
rows_file = "rows.jsonl"
dropout = 0.02
warmup_steps = 2

[rollout]
problems_per_step = 2
attempts_per_problem = 4
max_response_tokens = 48
max_turns = 3
engine_rows = 8

[sandbox]
preload = []

[resample]
keep = 4

[evaluate]
problems = 2

[[stage]]
name = "cold"
kind = "sft"
steps = 110

[[stage]]
name = "stage1"
kind = "rl"
steps = 4

[[stage]]
name = "stage3"
kind = "rl"
steps = 3
learning.reset_optimizer = true
data.drop_solved_attempts = 2
"""


def user(a: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Add {a} and 3"}


def call(code: str) -> dict[str, Any]:
    calls = [{"function": {"name": "python", "arguments": {"code": code}}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def tool(text: object) -> dict[str, Any]:
    return {"role": "tool", "content": str(text)}


def final(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>\\boxed{{{number}}}</answer>"}


def conversations(a: int) -> list[list[dict[str, Any]]]:
    """A right one, one that repairs a broken call, and a wrong guess."""
    works, answered = call(f"print({a}+3)"), tool(a + 3)
    return [
        [user(a), works, answered, final(a + 3)],
        [user(a), call(f"print({a}+3"), tool("SyntaxError"), works, answered, final(a + 3)],
        [user(a), final(a)],
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def workplace(folder: Path, *, with_tool: bool = True) -> Path:
    """Recipe and data, in the folder a command is run in."""
    folder.mkdir()
    (folder / "tiny.toml").write_text(RECIPE)
    shown = [c for a in range(2, 8) for c in conversations(a) if with_tool or len(c) == 2]
    write_rows(folder / "rows.jsonl", [{"messages": messages} for messages in shown])
    for name, numbers in (("train", range(2, 6)), ("test", range(6, 8))):
        write_rows(folder / f"{name}.jsonl", [{"question": f"Add {a} and 3", "answer": str(a + 3)} for a in numbers])
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that is over."""

    code: int
    out: str
    told: str


@dataclass(slots=True, kw_only=True)
class Command:
    """`rocstar ...` in a process group of its own, as a shell would start it."""

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, *arguments: str) -> Command:
        process = subprocess.Popen(
            [sys.executable, "-c", "from rocstar.cli import main; main()", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(folder=folder, process=process)

    def wait(self) -> Ended:
        out, told = self.process.communicate(timeout=200)
        return Ended(code=self.process.returncode, out=out, told=told)

    def after_step(self, step: int, act: Callable[[], None]) -> Ended:
        """Act once the run has recorded `step`, then wait for its end."""
        while len(metrics_lines(self.folder)) < step and self.process.poll() is None:
            time.sleep(0.002)
        if self.process.poll() is None:
            act()
        return self.wait()

    def interrupt(self) -> None:
        """Ctrl-C: the terminal tells every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)


def metrics_lines(folder: Path) -> list[str]:
    path = folder / "runs" / "tiny" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what a clock says."""
    rows = [json.loads(line) for line in metrics_lines(folder)]
    return [{k: v for k, v in row.items() if not k.startswith("cpu/") and "seconds" not in k} for row in rows]


def results(folder: Path) -> dict[str, Any]:
    run = folder / "runs" / "tiny"
    return {str(f.relative_to(run)): json.loads(f.read_text()) for f in run.glob("evals/*/*/result.json")}


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Every attempt of every RL step: what was written and what became of it."""
    import pyarrow.parquet as parquet

    files = sorted((folder / "runs" / "tiny" / "rollouts").glob("*.parquet"))
    return [
        {k: v for k, v in row.items() if "seconds" not in k and k != "turns"}
        for file in files
        for row in parquet.read_table(file).to_pylist()
    ]


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "runs" / "tiny" / "checkpoints").glob("step=*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """An uninterrupted run."""
    folder = workplace(tmp_path_factory.mktemp("whole") / "w")
    return folder, Command.start(folder, "train", "tiny.toml").wait()


def test_a_run_ends_with_a_table_and_learns_from_mixed_groups(finished: tuple[Path, Ended]) -> None:
    folder, ended = finished
    assert ended.code == 0, ended.told
    assert "before" in ended.out and "after" in ended.out
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, SFT_STEPS + RL_STEPS + 1))
    assert sum(row.get("learn/updates", 0) for row in rows) > 0
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows if "policy/logprob_gap_max" in row)
    assert rows[SFT_STEPS - 1]["loss"] < rows[0]["loss"] / 5
    assert len(attempts(folder)) == RL_STEPS * 8


def test_stage_three_keeps_its_choice_of_problems(finished: tuple[Path, Ended]) -> None:
    record = json.loads((finished[0] / "runs" / "tiny" / "pools" / "stage3.json").read_text())
    assert (record["attempts"], record["asked"]) == (2, 4)


def test_transformers_loads_the_last_checkpoint_unchanged(finished: tuple[Path, Ended]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = last_checkpoint(finished[0]) / "model"
    model, report = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rendered = tokenizer.apply_chat_template([user(4)], add_generation_prompt=True, return_tensors="pt")
    prompt = "<|im_start|>user\nAdd 4 and 3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rendered["input_ids"][0]) == prompt
    with torch.no_grad():
        logits = model(**rendered).logits
    assert logits.shape[-1] == len(tokenizer)
    assert "<" in tokenizer.decode(logits[0, -1].argmax())  # a tool call or an answer


def test_a_run_killed_and_stopped_at_random_points_ends_as_if_nothing_had_been(
    finished: tuple[Path, Ended], tmp_path: Path
) -> None:
    """kill -9 at three points and Ctrl-C at a fourth, each followed by --resume: in the cold start, around its end,
    in the first RL stage and in the last."""
    folder, rng = workplace(tmp_path / "w"), random.Random(os.getpid())
    points = [rng.randrange(1, SFT_STEPS - 10), SFT_STEPS + rng.randrange(-2, 2), SFT_STEPS + 4 + rng.randrange(0, 2)]
    command = Command.start(folder, "train", "tiny.toml")
    for point in points[:2]:
        assert command.after_step(point, command.process.kill).code == -signal.SIGKILL, points
        command = Command.start(folder, "train", "--resume", "tiny")
    stopped = command.after_step(SFT_STEPS + 2, command.interrupt)
    assert stopped.code == 130, stopped.told
    assert stopped.told.splitlines()[-1] == "rocstar: stopped; continue with: rocstar train --resume tiny"
    assert last_checkpoint(folder).name == f"step={len(metrics_lines(folder)):06d}"
    command = Command.start(folder, "train", "--resume", "tiny")
    assert command.after_step(points[2], command.process.kill).code == -signal.SIGKILL, points
    assert Command.start(folder, "train", "--resume", "last").wait().code == 0
    assert metrics(folder) == metrics(finished[0]), points
    assert results(folder) == results(finished[0])
    assert attempts(folder) == attempts(finished[0])
    weights = [last_checkpoint(f) / "model" / "model.safetensors" for f in (folder, finished[0])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def sandbox_host(command: Command) -> psutil.Process:
    children = psutil.Process(command.process.pid).children()
    return next(child for child in children if any("host" in word for word in child.cmdline()))


def test_a_sandbox_killed_in_the_middle_costs_no_attempt_its_reward(
    finished: tuple[Path, Ended], tmp_path: Path
) -> None:
    """Either the run goes on with a new sandbox, or it says in a sentence that it cannot; never a reward of 0."""
    folder = workplace(tmp_path / "w")
    command = Command.start(folder, "train", "tiny.toml")
    ended = command.after_step(SFT_STEPS + 1, lambda: sandbox_host(command).kill())
    assert "Traceback" not in ended.told
    if ended.code == 0:
        assert metrics(folder) == metrics(finished[0])
    else:
        assert ended.code in (1, 3)
        assert "sandbox" in ended.told.splitlines()[-1].lower()
        faults = [row for row in attempts(folder) if row["stop"] == "environment_failed"]
        assert all(row["reward"] is None and not row["kept"] for row in faults)


def test_a_model_that_never_calls_the_tool_ends_with_a_table(tmp_path: Path) -> None:
    folder = workplace(tmp_path / "w", with_tool=False)
    ended = Command.start(folder, "train", "tiny.toml").wait()
    assert ended.code == 0, ended.told
    assert "attempts without the tool" in ended.out
    assert {row["kept"] for row in attempts(folder)} == {False}
    assert all(row["drop/equal_rewards"] == 8 for row in metrics(folder)[SFT_STEPS:])
