"""What `rocstar plan --gpu cpu` says of three short runs, beside what they then take here.

    python benchmarks/plan_cpu.py                          # seconds by the clock: a quiet machine, about five minutes
    python benchmarks/plan_cpu.py --clock cpu              # CPU seconds: on a machine that has other work
    python benchmarks/plan_cpu.py --only own --clock cpu   # one of them

quickstart and arithmetic are those recipes with fewer steps; own is another one with a model of 3.2 million parameters,
groups of eight, one update a step and AdamW. Each is planned and then carried out, on the same cores, one after the
other. Prints a table and last one JSON line. Ends with 1 where a run's seconds or its peak memory are off by more than
a quarter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from frame import ROOT, Table, environment, parser, read_rows, report, rocstar

GOAL = 0.25
OWN = """\
extends = "quickstart.toml"
model.hidden_size = 256
model.num_layers = 4
model.num_heads = 8
model.num_kv_heads = 2
model.intermediate_size = 768
data.families = ["lin", "count", "two"]
data.demo_mix = "majority_right"
sft.batch_rows = 16
sft.optimizer = "adamw"
sft.tokens_per_microbatch = 2048
rollout.problems_per_step = 10
rollout.attempts_per_problem = 8
resample.method = "all"
resample.keep = 8
learning.updates_per_step = 1
evaluate.attempts = 2
"""
CASES = {"quickstart": (200, 6, 4, 3), "arithmetic": (300, 4, 3, 2), "own": (60, 4, 3, 2)}
"""Steps of imitation and of the three stages of RL, by recipe."""
COMMON = ["evaluate.problems=100", "end.window=1000"]  # no stage ends before its steps
PARTS = ("imitation", "RL and evaluation", "all")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments.add_argument("--only", choices=list(CASES), help="one case")
    arguments.add_argument("--plan", metavar="CASE", help="plan one and print it (internal)")
    arguments.add_argument("--recipes", type=Path, help="where its recipe lies (internal)")
    options = arguments.parse_args()
    if options.plan:
        print(json.dumps(planned(options.plan, options.recipes, options.clock)))
        return
    table = Table("run", "part", "planned", "measured", "ratio", width=20)
    found = {case: compared(case, options.clock, table) for case in ([options.only] if options.only else CASES)}
    report(clock=options.clock, runs=found)
    off = [rows[part]["ratio"] for rows in found.values() for part in ("all", "peak memory, MB")]
    raise SystemExit(0 if all(abs(ratio - 1) <= GOAL for ratio in off) else 1)


def compared(case: str, clock: str, table: Table) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as place:
        for recipe in (ROOT / "recipes").glob("*.toml"):
            (Path(place) / recipe.name).write_text(recipe.read_text())
        (Path(place) / "own.toml").write_text(OWN)
        said = launched([sys.executable, __file__, "--plan", case, "--recipes", place, "--clock", clock], place)
        plan = json.loads(said["out"].splitlines()[-1])
        names = ("run.folder=runs", "run.name=it")
        run = launched(rocstar("train", f"{case}.toml", *settings_of(case), *names), place)
        measured = taken(Path(place) / "runs" / "it", run, clock)
    rows = {name: {"planned": plan[name], "measured": measured[name]} for name in measured}
    for name, row in rows.items():
        row["ratio"] = row["planned"] / row["measured"]
        table.row(case, name, *row.values())
    return rows


def settings_of(case: str) -> list[str]:
    stages = zip(("sft", "stage1", "stage2", "stage3"), CASES[case], strict=True)
    return [*(f"stage.{stage}.steps={steps}" for stage, steps in stages), *COMMON]


def launched(command: list[str], place: str) -> dict[str, Any]:
    """A process to its end: what it printed, when it began and ended, CPU and peak memory of its tree."""
    out, began = Path(place) / "out", time.time()
    with out.open("w") as file:
        process = subprocess.Popen(command, cwd=place, env=environment(), stdout=file, stderr=file)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{command} ended with {process.returncode}: {out.read_text()[-2000:]}")
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    return {"out": out.read_text(), "began": began, "ended": time.time(), "cpu": cpu, "peak": peak}


def planned(case: str, recipes: Path, clock: str) -> dict[str, float]:
    from rocstar.support.threads import quiet_torch

    quiet_torch(1)
    from rocstar.config.recipe import load_recipe
    from rocstar.forecast.cpu import RUN
    from rocstar.forecast.trial import predicted
    from rocstar.support.screen import Screen
    from rocstar.train import rl_step

    recipe = load_recipe(recipes / f"{case}.toml", settings_of(case))
    plan = predicted(recipe, Screen(), rl_step, wall=clock == "wall")
    imitation = sum(phase.seconds for phase in plan.phases if phase.name == "sft")
    before = sum(phase.seconds for phase in plan.phases if phase.name == "start")
    values = (imitation, plan.seconds - imitation - before, plan.seconds)
    return {**dict(zip(PARTS, values, strict=True)), "peak memory, MB": plan.memory[RUN] / 1e6}


def taken(folder: Path, run: dict[str, Any], clock: str) -> dict[str, float]:
    """The same parts of a run that is over."""
    cpu = json.loads((folder / "summary.json").read_text())["cpu_seconds"]
    if clock == "cpu":
        rest = sum(cpu.values()) - cpu["sft"] - cpu["cold start"]
        values = cpu["sft"], rest, run["cpu"] + cpu["sandbox"]  # the run does not wait for its sandbox's processes
    else:
        imitated = next(
            e["time"] for e in read_rows(folder / "events.jsonl") if e["event"] == "stage_end" and e["name"] == "sft"
        )
        imitation = sum(row["step/seconds"] for row in read_rows(folder / "metrics.jsonl") if row["stage"] == "sft")
        values = imitation, run["ended"] - imitated, run["ended"] - run["began"]
    return {**dict(zip(PARTS, values, strict=True)), "peak memory, MB": run["peak"] / 1e6}


if __name__ == "__main__":
    main()
