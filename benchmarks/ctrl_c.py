"""Ctrl-C in every phase of every long verb: seconds until the command is over, its exit code, what it said, and what it
left behind.

    PYTHONPATH=. python benchmarks/ctrl_c.py --times 5 --data DATA --out runs/ctrl_c

Each command is started in a process group of its own. At a random moment, or so long after a line of its own that says
which phase it is in, the whole group gets SIGINT, as a terminal sends it. Wanted: over within 2 seconds with exit code
130 (0 where Ctrl-C is how a command ends), one sentence, no traceback, no process left. `--only` names phases. Prints a
table and, last, one JSON line; exit code 1 where something else happened. That a run which goes on afterwards learns
what an undisturbed one does: kill_stages.py with `--signal INT`."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from frame import ROOT, Table, environment, marked, parser, report, rocstar

from tests.tiny_run import Command, workplace

MARK = "ROCSTAR_CTRL_C"
"""An environment variable by which every process of a command is found."""
LIMIT_SECONDS = 2.0
ORPHAN_SECONDS = 1.0  # for children to have ended after the command
PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.005
BIRTH_SECONDS = 0.5  # in which Python itself starts, and none of ours could answer
LONG = (
    *("model.max_positions=4096", "rollout.max_response_tokens=2000", "stage.stage1.rollout.max_response_tokens=2000"),
    *("stage.sft.steps=2", "evaluate.problems=0", "rollout.engine_rows=64", "rollout.attempts_per_problem=32"),
)
"""Rollouts that go on for minutes: the model has hardly learnt to stop."""
FEW = ("evaluate.problems=0", "stage.sft.steps=2")
AHEAD, TWO, POOL = "rollout.max_staleness_steps=1", "cluster.learners=2", "stage.stage1.data.drop_solved_attempts=8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A command to interrupt."""

    name: str
    words: Sequence[str]
    """After `rocstar`; DATA, OUT and TINY stand for folders."""
    said: str = ""
    """A pattern of the line after which it is in this phase; none: from its start on."""
    spread: float = 1.0
    """Seconds of the phase: the signal comes at a random moment of them."""
    code: int = 130
    lines: str = ""
    """Standard input, left open."""


QUICK = str(ROOT / "recipes" / "quickstart.toml")
PHASES = (
    Phase(name="start", words=("train", QUICK), spread=3.0),
    Phase(name="train: cold start", words=("train", QUICK), said="cold start:", spread=3.0),
    Phase(name="train: imitation", words=("train", QUICK, "evaluate.problems=0"), said="sft step", spread=3.0),
    Phase(name="train: evaluation", words=("train", QUICK, "stage.sft.steps=2"), said="before: eval", spread=6.0),
    Phase(name="train: step", words=("train", QUICK, *FEW), said="stage1 step", spread=10.0),
    Phase(name="train: rollouts", words=("train", QUICK, *LONG), said="stage1: ", spread=10.0),
    Phase(name="train: ahead", words=("train", QUICK, *FEW, AHEAD), said="stage1 step", spread=10.0),
    Phase(name="train: engine process", words=("train", "OUT/engines.toml", *FEW), said="stage1: ", spread=8.0),
    Phase(name="train: two learners", words=("train", QUICK, *FEW, TWO), said="stage1: ", spread=8.0),
    Phase(name="train: pool", words=("train", QUICK, *FEW, POOL), said="sft step 2/2", spread=4.0),
    Phase(name="eval: start", words=("eval", "TINY", "--data", "TINYDATA"), spread=6.0),
    Phase(name="eval", words=("eval", "TINY", "--data", "TINYDATA", "--n", "2000"), said="eval: ", spread=5.0),
    Phase(name="chat: start", words=("chat", "TINY", "-p", "Add 2 and 3"), spread=5.0),
    Phase(name="chat: waiting", words=("chat", "TINY"), said="boxed|cut after", spread=1.0, lines="Add 2 and 3\n"),
    Phase(name="serve: start", words=("serve", "TINY", "--port", "0"), spread=4.0),
    Phase(name="serve", words=("serve", "TINY", "--port", "0"), said="Ctrl-C ends", code=130),
    Phase(name="view", words=("view", "TINY", "--port", "0", "--no-browser"), said="Ctrl-C ends", code=130),
    Phase(name="view: start", words=("view", "TINY", "--port", "0", "--no-browser"), spread=0.8),
    Phase(name="sandbox serve", words=("sandbox", "serve", "--port", "0"), said="http", code=0),
    Phase(name="sandbox serve: start", words=("sandbox", "serve", "--port", "0"), spread=1.5),
    Phase(name="sandbox exec", words=("sandbox", "exec", "import time; time.sleep(60)"), spread=2.0),
    Phase(name="sandbox bench", words=("sandbox", "bench", "here"), spread=3.0),
    Phase(name="data build", words=("data", "build", "POOL", "data=DATA", "out=OUT/pool"), spread=15.0),
    Phase(name="data check", words=("data", "check", "DATA/deepmath/train.jsonl.gz"), spread=8.0),
    Phase(name="data sft", words=("data", "sft", "OUT/mix.toml", "--out", "OUT/sft"), spread=15.0),
    Phase(name="simulate", words=("simulate", "--problems", "512", "--engines", "32"), spread=10.0),
    Phase(name="doctor", words=("doctor",), spread=5.0),
    Phase(name="analyze", words=("analyze", "TINY"), spread=3.0),
    Phase(name="verify", words=("verify", "--cases", "OUT/cases.jsonl"), spread=5.0),
    Phase(name="compare", words=("compare", "TINY/before", "TINY/after", "--detect", "0.001"), spread=2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command took Ctrl-C."""

    seconds: float
    """From the signal until the command is over."""
    cpu_seconds: float
    """That the command's first process computed meanwhile: what the wait comes to on a machine that is idle."""
    code: int
    said: str
    """All that it said after the signal."""
    orphans: int
    early: bool = False
    """It was over before the signal."""

    def complaints(self, phase: Phase) -> list[str]:
        told = [
            (self.seconds > LIMIT_SECONDS, f"{self.seconds:.1f} s"),
            (self.code != phase.code, f"exit code {self.code}"),
            ("Traceback" in self.said or "Exception ignored" in self.said, "traceback"),
            (phase.code != 0 and len(re.findall("^rocstar: .+", self.said, re.MULTILINE)) != 1, "not one sentence"),
            (self.orphans > 0, f"{self.orphans} processes left"),
        ]
        return [] if self.early else [complaint for happened, complaint in told if happened]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--times", type=int, default=5, help="Interruptions of each phase.")
    arguments.add_argument("--data", type=Path, required=True, help="Folder of published data sets.")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--only", default="", help="Phases whose name matches this pattern.")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    # A shell lets what it starts in the background ignore SIGINT, and commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.out.mkdir(parents=True, exist_ok=True)
    names = places(given.out.resolve(), given.data.resolve())
    draw = random.Random(given.seed)
    found = []
    table = Table("phase", "times", "median s", "worst s", "CPU s", "complaints")

    def tell(told: dict[str, Any]) -> None:
        found.append(told)
        table.row(*list(told.values())[:-1])

    for phase in (phase for phase in PHASES if re.search(given.only, phase.name)):
        tell(row(phase, [interrupted(phase, names, draw) for _ in range(given.times)]))
    report(phases=found)
    sys.exit(any(line["complaints"] for line in found))


def places(out: Path, data: Path) -> dict[str, str]:
    """Folders and files that commands need, made where they are absent."""
    tiny = out / "tiny"
    if not (tiny / "runs").exists():
        assert Command.start(workplace(tiny), "train", "tiny.toml").wait().code == 0
    (out / "engines.toml").write_text(f'extends = "{QUICK}"\n[[engine]]\nname = "local"\nkind = "torch"\n')
    mix = (ROOT / "recipes" / "data" / "sft_mix.toml").read_text()
    (out / "mix.toml").write_text(mix.replace("../shared/data", str(data)))
    cases = ({"gold": f"\\sqrt{{{n}}}+1", "response": f"\\boxed{{1+{n}^{{1/2}}}}", "expected": 1} for n in range(4000))
    (out / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    pool = str(ROOT / "recipes" / "data" / "math_pool.toml")
    return {
        **{"TINYDATA": str(tiny / "test.jsonl"), "TINY": str(tiny / "runs" / "tiny"), "POOL": pool},
        **{"DATA": str(data), "OUT": str(out)},
    }


def interrupted(phase: Phase, names: dict[str, str], draw: random.Random) -> Ended:
    """One command, started, interrupted, and waited for."""
    words = [re.sub("|".join(names), lambda match: names[match[0]], word) for word in phase.words]
    folder = Path(names["OUT"]) / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mark, log = uuid.uuid4().hex, folder / "log"
    with log.open("wb") as out:
        child: dict[str, Any] = {"cwd": folder, "env": environment(**{MARK: mark}), "start_new_session": True}
        process = subprocess.Popen(rocstar(*words), stdin=subprocess.PIPE, stdout=out, stderr=out, **child)
    assert process.stdin is not None
    process.stdin.write(phase.lines.encode())
    process.stdin.flush()
    until = time.monotonic() + PATIENCE_SECONDS
    while phase.said and not re.search(phase.said, log.read_text(errors="replace"), re.MULTILINE):
        if process.poll() is not None or time.monotonic() > until:
            break
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0 if phase.said else BIRTH_SECONDS, phase.spread))
    return ended(process, log, mark)


def ended(process: subprocess.Popen[bytes], log: Path, mark: str) -> Ended:
    """After a Ctrl-C."""
    early = process.poll() is not None
    before = log.stat().st_size
    began, computed = time.monotonic(), cpu_seconds(process.pid)
    if not early:
        os.killpg(process.pid, signal.SIGINT)
    while not early and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(LOOK_SECONDS)
        if time.monotonic() - began > PATIENCE_SECONDS:
            process.kill()
    seconds, computed = time.monotonic() - began, cpu_seconds(process.pid) - computed
    code = process.wait()
    until = time.monotonic() + ORPHAN_SECONDS
    while (left := marked(MARK, mark)) and time.monotonic() < until:
        time.sleep(0.02)
    for orphan in left:
        orphan.kill()
    said = log.read_bytes()[before:].decode(errors="replace")
    return Ended(seconds=seconds, cpu_seconds=computed, code=code, said=said, orphans=len(left), early=early)


def cpu_seconds(pid: int) -> float:
    """Of a process so far, also where it has ended and was not waited for; 0 where it was."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


def row(phase: Phase, all_ended: Sequence[Ended]) -> dict[str, Any]:
    there = [one for one in all_ended if not one.early]
    seconds = [one.seconds for one in there] or [0.0]
    complaints = sorted({complaint for one in there for complaint in one.complaints(phase)})
    if bad := next((one for one in there if set(one.complaints(phase)) - {f"{one.seconds:.1f} s"}), None):
        print(f"  {phase.name} said: {bad.said[-1500:]!r}", file=sys.stderr)
    return {
        "name": phase.name,
        "times": len(there),
        "median": round(median(seconds), 3),
        "worst": round(max(seconds), 3),
        "worst_cpu": round(max([one.cpu_seconds for one in there] or [0.0]), 3),
        "complaints": ", ".join(complaints),
        "last": (there[-1].said.strip().splitlines() or [""])[-1] if there else "",
    }


if __name__ == "__main__":
    main()
