"""A run small enough for tests: its recipe, its data, the command that carries it out, and what it left behind.

The model (25,000 parameters) learns a dozen conversations by heart, tool calls included, so that RL sees right and
wrong attempts, failed programs and truncated ones within seconds."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from runpy import run_module, run_path
from tempfile import TemporaryFile
from typing import IO, Any

from rocstar.record.journal import read_journal
from tests.files import jsonl
from tests.forks import Forked, fork_children, forked, opened_by

SFT_STEPS, RL_STEPS = 110, 7  # of the stages of RECIPE
COLD_STEPS = 2  # of a run that `begun` is given to
PLAIN_STEPS = 7  # of `plain_run`: after the cold start two of stage1, which is over by its rule, and three of stage3
GLANCE = 0.01  # seconds between two looks at what a run has written: to look takes CPU from the run
RECIPE = """\
[run]
name = "tiny"
folder = "runs"
checkpoint_seconds = 0
checkpoint_cost = 1

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
optimizer = "muon"
adamw_learning_rate = 3e-3
decay = "linear"
decay_share = 0.4
context_loss_weight = 0.1
rows_file = "rows.jsonl"
dropout = 0.02
warmup_steps = 2

[rollout]
problems_per_step = 2
attempts_per_problem = 4
max_response_tokens = 48
max_turns = 3
template = "compact"
feedback_errors = "short"
engine_rows = 8

[sandbox]
preload = []

[resample]
keep = 4

[learning]
learning_rate = 4e-4
beta2 = 0.95
weight_decay = 0.0
warmup_steps = 0
updates_per_step = 2

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


ROCSTAR, ROCSTAR_WITH, PYTHON = (f"tests.tiny_run:{name}" for name in ("rocstar", "rocstar_with", "python"))
"""What a process is forked for (`tests.forks.forked`)."""


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


def workplace(folder: Path, *, with_tool: bool = True) -> Path:
    """Recipe and data, in the folder a command is run in."""
    folder.mkdir()
    (folder / "tiny.toml").write_text(RECIPE)
    shown = [c for a in range(2, 8) for c in conversations(a) if with_tool or len(c) == 2]
    jsonl(folder / "rows.jsonl", *({"messages": messages} for messages in shown))
    for name, numbers in (("train", range(2, 6)), ("test", range(6, 8))):
        jsonl(folder / f"{name}.jsonl", *({"question": f"Add {a} and 3", "answer": str(a + 3)} for a in numbers))
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that is over."""

    code: int
    out: str
    told: str


@dataclass(slots=True, kw_only=True)
class Command:
    """`rocstar ...` in a process group of its own, as a shell would start it.

    The process is forked from one that has loaded torch already (`tests.forks`), and so are the learners and engines
    that it starts. `started_cold` loads everything anew, as a person's command does."""

    folder: Path
    process: Forked
    said: Sequence[IO[bytes]]
    """What it writes to stdout and stderr."""

    @classmethod
    def start(cls, folder: Path, *arguments: str, act: str = ROCSTAR) -> Command:
        said = [TemporaryFile(), TemporaryFile()]  # noqa: SIM115 (read once the command is over)
        files = [os.devnull, *(opened_by(os.getpid(), file.fileno()) for file in said)]
        return cls(folder=folder, process=forked(act, *arguments, folder=folder, files=files), said=said)

    def wait(self) -> Ended:
        self.process.join(timeout=500)
        out, told = (file.read().decode() for file in self.said)
        code = self.process.exitcode
        assert code is not None, f"still running after 200 s: {told}"
        return Ended(code=code, out=out, told=told)

    def after_step(self, step: int, act: Callable[[], None]) -> Ended:
        """Act once the run has recorded `step`, then wait for its end. A kill then comes before that step is saved."""
        return self.once(lambda: len(metrics_lines(self.folder)) >= step, act)

    def once(self, is_so: Callable[[], bool], act: Callable[[], None]) -> Ended:
        """Act once this is so, then wait for the run's end."""
        while not is_so() and self.process.is_alive():
            time.sleep(GLANCE)
        if self.process.is_alive():
            act()
        return self.wait()

    def interrupt(self) -> None:
        """Ctrl-C: the terminal tells every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)


def started_cold(folder: Path, *arguments: str) -> Ended:
    command = [sys.executable, "-c", "from rocstar.cli.main import main; main()", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, start_new_session=True)
    return Ended(code=done.returncode, out=done.stdout, told=done.stderr)


def rocstar(*arguments: str) -> None:
    """The command, in this process."""
    from rocstar.cli.main import main

    fork_children()
    sys.argv[:] = ["rocstar", *arguments]
    main()


def rocstar_with(python: str, *arguments: str) -> None:
    """The command, in this process; it starts others with that Python."""
    sys.executable = python
    rocstar(*arguments)


def python(*arguments: str) -> None:
    """`python -c PROGRAM ...`, `python -m MODULE ...` or `python FILE ...`, in this process."""
    match arguments:
        case ("-c", program, *rest):
            sys.argv[:] = ["-c", *rest]
            exec(program, {"__name__": "__main__"})
        case ("-m" | "-Pm", module, *rest):
            sys.argv[:] = [module, *rest]
            run_module(module, run_name="__main__", alter_sys=True)
        case (file, *_):
            sys.argv[:] = arguments
            run_path(file, run_name="__main__")


def killed_run(place: Path, step: int, *given: str) -> Path:
    """The workplace of a run that kill -9 ended after this step, to be resumed. place: its name takes a number."""
    for number in range(5):  # on a busy machine a run may be over before anybody sees that step
        command = Command.start(workplace(place.with_name(f"{place.name}-{number}")), *given)
        if command.after_step(step, command.process.kill).code == -signal.SIGKILL:
            return command.folder
    raise AssertionError(f"no run was seen after step {step} before it was over")


def finished_run(base: Path) -> tuple[Path, Ended]:
    """An uninterrupted run of the recipe, to be read only: what it learns takes a third of its CPU seconds less with a
    checkpoint at the end of each stage alone. base: pytest's base folder of this process."""
    given = ("train", "tiny.toml", "run.checkpoint_seconds=1000")
    return run_once(base, "finished", lambda folder: Command.start(folder, *given).wait())


def cold_run(base: Path) -> tuple[Path, Ended]:
    """The cold start of that run alone, where a test session asks for no more of it."""
    given = ("stage.stage1.steps=0", "stage.stage3.steps=0")
    return run_once(base, "cold", lambda folder: Command.start(folder, "train", "tiny.toml", *given).wait())


def begun(
    base: Path, steps: int = COLD_STEPS, run: Callable[[Path], tuple[Path, Ended]] = finished_run
) -> tuple[str, ...]:
    """Settings that start from the model that the cold start of `run` left, and learn next to nothing in their own: for
    tests of what comes after it."""
    model = run(base)[0] / "runs" / "tiny" / "checkpoints" / f"step={SFT_STEPS:06d}" / "model"
    alike = ("sft.optimizer=adamw", "sft.adamw_learning_rate=1e-5", "sft.dropout=0", "sft.warmup_steps=0")
    return (f"model.path={model}", f"stage.cold.steps={steps}", *alike)  # however many ranks there are


AS_PLAIN = (
    *("sft.optimizer=muon", "sft.muon_learning_rate=1e-5", "sft.dropout=0.02", "learning.top_entropy_share=0.5"),
    *("stage.stage1.end.window=1", "stage.stage1.end.reward_gain=1", "evaluate.every_steps=2"),
    "stage.stage1.rollout.max_response_tokens=47",
)
"""What `plain_run` says beside `begun`: as many kinds of state as one process has, and a stage that ends by its rule,
because no reward rises by 1."""


def plain_run(base: Path) -> tuple[Path, Ended]:
    """A short run that nothing disturbed, to be read only."""
    given = (*begun(base), *AS_PLAIN)
    return run_once(base, "plain", lambda made: Command.start(made, "train", "tiny.toml", *given).wait())


def run_once(base: Path, name: str, carry_out: Callable[[Path], Ended]) -> tuple[Path, Ended]:
    """In a workplace of that name."""
    folder, ended = once(base, name, lambda folder: asdict(carry_out(workplace(folder))))
    return folder, Ended(**ended)


def once(base: Path, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """The folder that `make` made, and what it returned: by the first process of a test session that asks, while the
    others wait. base: pytest's base folder of this process."""
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, said = shared / name, shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            said.write_text(json.dumps(make(folder)))
    return folder, json.loads(said.read_text())


def metrics_lines(folder: Path, name: str = "tiny") -> list[str]:
    path = folder / "runs" / name / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def metrics(folder: Path, name: str = "tiny") -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what a clock says, and without what is only where engines are other processes."""
    rows = [json.loads(line) for line in metrics_lines(folder, name)]
    return [
        {k: v for k, v in row.items() if not k.startswith(("cpu/", "weights/")) and "second" not in k} for row in rows
    ]


def results(folder: Path) -> dict[str, Any]:
    run = folder / "runs" / "tiny"
    kept = {str(f.relative_to(run)): json.loads(f.read_text()) for f in run.glob("evals/*/*/result.json")}
    for result in kept.values():
        del result["setup"]["git"]  # a commit may come between
        data = result["setup"]["data"]
        data["test_files"] = [str(Path(file).relative_to(folder)) for file in data["test_files"]]
    return kept


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Every attempt of every RL step: what was written and what became of it."""
    import pyarrow.parquet as parquet

    files = sorted((folder / "runs" / "tiny" / "rollouts").glob("*.parquet"))
    return [
        {k: v for k, v in row.items() if "seconds" not in k and k != "turns"}
        for file in files
        for row in parquet.read_table(file).to_pylist()
    ]


def versions(folder: Path) -> list[tuple[int, set[int]]]:
    """Per attempt of every RL step: the policy version it is filed under, and those that wrote its tokens."""
    import pyarrow.parquet as parquet

    files = sorted((folder / "runs" / "tiny" / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    return [
        (row["policy_version"], {version for turn in json.loads(row["turns"]) for version, _ in turn["version_spans"]})
        for row in rows
    ]


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "runs" / "tiny" / "checkpoints").glob("step=*"))


def weights(folder: Path, step: int | None = None) -> bytes:
    """Of this step's checkpoint, or of the last one."""
    found = last_checkpoint(folder) if step is None else last_checkpoint(folder).with_name(f"step={step:06d}")
    return (found / "model" / "model.safetensors").read_bytes()


def stage_ends(folder: Path) -> list[tuple[str, int, str]]:
    """Name, steps and reason of each stage that is over."""
    events = read_journal(folder / "runs" / "tiny" / "events.jsonl")
    return [(e["name"], e["steps"], e["reason"]) for e in events if e["event"] == "stage_end"]
