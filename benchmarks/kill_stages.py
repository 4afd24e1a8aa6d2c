"""A run under stage rules that is killed (SIGKILL) again and again, against the same run undisturbed: stages, rules,
problem pools, evaluations and final weights must be the same.

    PYTHONPATH=. python benchmarks/kill_stages.py --kills 30 --out runs/kills
    PYTHONPATH=. python benchmarks/kill_stages.py --signal INT               # Ctrl-C, after which a run saves

The recipe is the quickstart's course on the tiny model of the tests: a cold start and three stages with `[end]` rules,
the hard-problem filter, an evaluation every other step, and a benchmark; `--recipe FILE` takes another one, with
`--settings KEY=VALUE ...`. Two kills in three come at a random moment;
the others are aimed at a choice of problems, an evaluation or the end of a stage that is under way."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import environment, parser, rocstar

from rocstar.record.folder import RunFolder
from rocstar.record.journal import read_journal
from tests.files import jsonl
from tests.tiny_run import RECIPE, workplace

SUMS = range(2, 26)
"""Problems to learn from; the cold start shows how the first six go, so that some are solved always and some never."""
STAGES = """
[[stage]]
name = "stage2"
kind = "rl"
steps = 6
rollout.max_response_tokens = 64
end.window = 2
end.solved_share = 0.2

[[stage]]
name = "stage3"
kind = "rl"
steps = 6
learning.reset_optimizer = true
data.drop_solved_attempts = 4
end.window = 2
end.reward_gain = 0.05

[[evaluate.benchmark]]
name = "sums.toml"
folder = "."
"""
SMALL = (
    *("run.keep_checkpoints=2", "rollout.problems_per_step=6", "stage.cold.steps=110"),
    *("stage.stage1.steps=8", "stage.stage1.end.window=2", "stage.stage1.end.reward_gain=0.05"),
    *("evaluate.problems=12", "evaluate.every_steps=2"),
)
"""Changes of the recipe of tests/tiny_run.py."""
BENCHMARK = """
title = "Small sums"
source = "made here"
kind = "math"
files = ["sums.jsonl"]

[protocol]
attempts = 2
temperature = 0.6
settings = ["rollout.max_response_tokens=48", "rollout.max_turns=2"]
"""
LOOK_SECONDS = 0.003
STARTUP = 4.0  # seconds that a process needs before its first step
PATIENCE_SECONDS = 3600


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a run goes on."""

    folder: Path
    recipe: Sequence[str] = ("tiny.toml", *SMALL)
    """With its settings."""

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "tiny")

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        begun = (self.run.path / "run.json").exists()
        words = ["--resume", "tiny"] if begun else self.recipe
        child = {"cwd": self.folder, "env": environment(), "start_new_session": True}
        with log.open("ab") as out:
            return subprocess.Popen(rocstar("train", *words), stdout=out, stderr=out, **child)

    def steps(self) -> int:
        file = self.run.metrics
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def phase(self) -> str:
        """What is under way, from the files alone."""
        path = self.run.path
        if any(not journal.with_suffix(".json").exists() for journal in path.glob("pools/*.jsonl")):
            return "choice of problems"
        if any(not (file.parent / "result.json").exists() for file in path.glob("evals/*/*/asked.jsonl")):
            return "evaluation"
        if any(path.glob("checkpoints/.*.new")):
            return "saving"
        return "steps" if self.steps() else "start"


def made(folder: Path, recipe: Path | None, settings: Sequence[str]) -> Place:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if recipe:
        folder.mkdir()
        return Place(folder=folder, recipe=[str(recipe.resolve()), "run.name=tiny", "run.folder=runs", *settings])
    workplace(folder)
    until_stage3 = RECIPE.split('[[stage]]\nname = "stage3"')[0]
    (folder / "tiny.toml").write_text(until_stage3 + STAGES)
    (folder / "sums.toml").write_text(BENCHMARK)
    for name, numbers in (("train", SUMS), ("test", range(26, 38)), ("sums", range(1, 9))):
        jsonl(folder / f"{name}.jsonl", *({"question": f"Add {a} and 3", "answer": str(a + 3)} for a in numbers))
    return Place(folder=folder)


def finished(place: Place, log: Path) -> float:
    """Left alone until it ends; wall seconds."""
    began = time.monotonic()
    if place.start(log).wait(PATIENCE_SECONDS):
        raise SystemExit(f"the run in {place.folder} failed; see {log}")
    return time.monotonic() - began


def aims(place: Place, ends: Mapping[str, int]) -> dict[str, Callable[[], bool]]:
    """What a kill may wait for, by name."""
    return {
        "choice of problems": lambda: place.phase() == "choice of problems",
        "evaluation": lambda: place.phase() == "evaluation",
        "end of a stage": lambda: place.steps() in ends.values(),
    }


def killed(
    place: Place, log: Path, kills: int, whole: float, ends: Mapping[str, int], draw: random.Random, by: signal.Signals
) -> Counter[str]:
    """Kill and start again, then leave the run alone until it ends; how many kills came during what."""
    found: Counter[str] = Counter()
    while found.total() < kills:
        process, place_before = place.start(log), place.phase()
        aim = draw.choice([*aims(place, ends).items()]) if draw.random() < 1 / 3 else None
        until = time.monotonic() + draw.uniform(0, 2 * whole / kills + STARTUP)
        while process.poll() is None and (time.monotonic() < until if aim is None else not aim[1]()):
            time.sleep(LOOK_SECONDS)
            if aim and time.monotonic() > until + whole:
                break
        if process.poll() is not None:
            if process.returncode:
                raise SystemExit(f"a run that was to be killed failed by itself ({place_before}); see {log}")
            break
        found[place.phase()] += 1
        process.send_signal(by)
        process.wait()
    return found


def facts(place: Place) -> dict[str, Any]:
    """All that must not depend on kills."""
    run = place.run
    events = read_journal(run.events)
    ends = {(e["name"], e["step"], e["steps"], e["reason"]) for e in events if e["event"] == "stage_end"}
    last = run.checkpoint(run.checkpoint_steps()[-1])
    return {
        "stages": sorted(ends, key=lambda end: end[1]),
        "metrics": [_timeless(row) for row in read_journal(run.metrics)],
        "pools": {f.name: json.loads(f.read_text()) for f in sorted(run.path.glob("pools/*.json"))},
        "pool rows": {f.name: sorted(f.read_text().splitlines()) for f in run.path.glob("pools/*.jsonl")},
        "evaluations": {(name, step): _figures(result) for name, step, result in run.evaluations()},
        "weights": {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted((last / "model").glob("*.safetensors"))
        },
        "warnings": sorted({(e["step"], e["name"]) for e in events if e["event"] == "warning"}),
    }


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if "second" not in key and not key.startswith(("cpu/", "engine/"))}


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "setup"}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=30)
    arguments.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments.add_argument("--signal", choices=["KILL", "INT", "TERM"], default="KILL")
    arguments.add_argument("--recipe", type=Path)
    arguments.add_argument("--settings", nargs="+", default=[])
    arguments.add_argument("--out", type=Path, default=Path("runs/kills"))
    given = arguments.parse_args()
    by = signal.Signals[f"SIG{given.signal}"]
    shutil.rmtree(given.out, ignore_errors=True)
    log = given.out.resolve() / "log.txt"
    calm, shaken = (made(given.out.resolve() / name, given.recipe, given.settings) for name in ("calm", "shaken"))
    whole = finished(calm, log)
    wanted = facts(calm)
    ends = {name: step for name, step, _, _ in wanted["stages"]}
    print(f"undisturbed: {whole:.0f} s;", "; ".join(f"{n} after {s}: {why}" for n, _, s, why in wanted["stages"]))
    kills: Counter[str] = Counter()
    rounds = 0
    while kills.total() < given.kills:  # a run that ended before it was killed often enough is followed by another
        rounds += 1
        shutil.rmtree(shaken.folder)
        shaken = made(shaken.folder, given.recipe, given.settings)
        draw = random.Random(given.seed + rounds)
        kills += killed(shaken, log, given.kills - kills.total(), whole, ends, draw, by)
        finished(shaken, log)
        got = facts(shaken)
        for name, value in wanted.items():
            print(f"| run {rounds} | {name} | {len(value)} | {'the same' if got[name] == value else 'DIFFERENT'} |")
        if got != wanted:
            sys.exit(1)
    told = ", ".join(f"{count} during {name}" for name, count in kills.items())
    print(f"{kills.total()} kills in {rounds} runs: {told}")


if __name__ == "__main__":
    main()
