"""What is won when rollouts go on while the learner learns, and what it costs in accuracy.

    python benchmarks/overlap.py --out runs/overlap                       # three seeds of each: about 40 CPU minutes
    python benchmarks/overlap.py --out runs/short --seeds 0 --steps 12    # the first steps of one seed: about 6
    python benchmarks/overlap.py --out runs/overlap --table               # only read what is there and print

The quickstart's RL stages from one cold start, on torch engines in processes of their own (--engines): strictly
on-policy, and with attempts of one or two steps made ahead of the updates, without and with truncated importance
sampling. Each cell is one `rocstar train` in a process of its own; cells that are done are not run again. Needs a core
for each engine, and one for the learner and the sandbox, to show what overlap wins in time.

Per way: seconds a step; CPU seconds a step of all processes (overlap costs feeding tokens again after a swap of
weights), with those in which engines start, about 8 in all, because the first row of metrics has these and, where
attempts are made ahead, those of later steps; share of the time in which engines did nothing (CPU seconds of their
processes over the wall time of the steps, so true only where each has a core), without the first row.
Staleness in updates; accuracy on the held-out problems at the end with the range over seeds and Wilson's 95% interval
of the problems of all seeds (the same problems for each seed, so it is narrower than seeds vary). Prints a table and
last one JSON line.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from frame import ROOT, Table, newest_model, parser, read_rows, report, run_cell, slug

from rocstar.evaluation.intervals import wilson

WAYS = {
    "on-policy": [],
    "ahead 1": ["rollout.max_staleness_steps=1", "learning.importance_cap=0"],
    "ahead 1, TIS": ["rollout.max_staleness_steps=1", "learning.importance_cap=2"],
    "ahead 2, TIS": ["rollout.max_staleness_steps=2", "learning.importance_cap=2"],
}
RECIPE = f"""\
extends = "{ROOT / "recipes" / "quickstart.toml"}"

[[engine]]
name = "local"
kind = "torch"
"""
NO_COLD_START = ["stage.sft.steps=0"]
FIRST_STAGE_ALONE = ["stage.stage2.steps=0", "stage.stage3.steps=0"]
CPU = [f"cpu/{part}" for part in ("pool", "rollout", "learning", "record", "sandbox", "engines")]  # of a step
Cell = dict[str, float]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/overlap"))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument("--engines", type=int, default=2, help="processes; --out holds runs of one number only")
    options.add_argument("--steps", type=int, help="of RL, all in the first stage; the recipe's own otherwise")
    options.add_argument("--table", action="store_true", help="run nothing")
    arguments = options.parse_args()
    out: Path = arguments.out.resolve()
    if not arguments.table:
        run_everything(out, arguments.ways, arguments.seeds, engines=arguments.engines, steps=arguments.steps)
    cells = {way: read_cells(out, way, arguments.seeds, arguments.engines) for way in arguments.ways}
    figures = {way: in_all(found) for way, found in cells.items() if found}
    print_table(figures)
    report(ways=figures, cells=cells)


def run_everything(out: Path, ways: list[str], seeds: list[int], *, engines: int, steps: int | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    recipe = out / "recipe.toml"
    recipe.write_text(RECIPE)
    run_cell(out / "cold", "sft", "recipes/quickstart.toml", [])
    model = f"model.path={newest_model(out / 'cold')}"
    always = [model, f"engine.local.count={engines}", *NO_COLD_START]
    if steps:
        always += [f"stage.stage1.steps={steps}", *FIRST_STAGE_ALONE]
    for seed in seeds:
        for way in ways:
            run_cell(out / cell_name(way, seed), "train", str(recipe), [*always, f"run.seed={seed}", *WAYS[way]])


def cell_name(way: str, seed: int) -> str:
    return f"{slug(way)}--seed{seed}"


def read_cells(out: Path, way: str, seeds: list[int], engines: int) -> list[Cell]:
    folders = [out / cell_name(way, seed) for seed in seeds]
    return [read_cell(folder, engines) for folder in folders if (folder / "summary.json").exists()]


def read_cell(folder: Path, engines: int) -> Cell:
    summary = json.loads((folder / "summary.json").read_text())
    steps = list(read_rows(folder / "metrics.jsonl"))
    seconds = sum(step["step/seconds"] for step in steps)
    later = sum(step["step/seconds"] for step in steps[1:])
    worked = sum(step["cpu/engines"] for step in steps[1:])
    cpu = sum(seconds for step in steps for name, seconds in step.items() if name in CPU)
    accuracy = summary["accuracy_after"]
    return {
        "steps": len(steps),
        "seconds": seconds,
        "seconds_per_step_median": median(step["step/seconds"] for step in steps),
        "cpu_seconds_per_step": cpu / len(steps),
        "engines_idle": max(0.0, 1 - worked / (engines * later)),
        "overlap_seconds": sum(step.get("step/overlap_seconds", 0.0) for step in steps),
        "tokens": sum(step["step/tokens"] for step in steps),
        "staleness_mean": fmean(step.get("staleness/mean", 0.0) for step in steps),
        "staleness_max": max(step.get("staleness/max", 0.0) for step in steps),
        "accuracy_before": summary["accuracy_before"]["value"],
        "accuracy": accuracy["value"],
        "problems": accuracy["n"],
        "greedy": summary["greedy_after"]["value"],
    }


def in_all(cells: list[Cell]) -> dict[str, Any]:
    """Seeds together; the interval is of all their held-out problems as one sample."""
    problems = round(sum(cell["problems"] for cell in cells))
    right = round(sum(cell["accuracy"] * cell["problems"] for cell in cells))
    estimate = wilson(right, problems)
    steps = sum(cell["steps"] for cell in cells)
    return {
        "seeds": len(cells),
        "seconds_per_step": sum(cell["seconds"] for cell in cells) / steps,
        "cpu_seconds_per_step": fmean(cell["cpu_seconds_per_step"] for cell in cells),
        "engines_idle": fmean(cell["engines_idle"] for cell in cells),
        "overlap_seconds_per_step": sum(cell["overlap_seconds"] for cell in cells) / steps,
        "staleness_mean": fmean(cell["staleness_mean"] for cell in cells),
        "staleness_max": max(cell["staleness_max"] for cell in cells),
        "accuracy": right / problems,
        "interval": [estimate.low, estimate.high],
        "range": [min(cell["accuracy"] for cell in cells), max(cell["accuracy"] for cell in cells)],
        "greedy": fmean(cell["greedy"] for cell in cells),
    }


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("", "seeds", "s/step", "CPU s", "idle", "overlap s", "stale mean", "max", "accuracy", "95% interval",
                  "range", "greedy", first=14)  # fmt: skip
    for way, found in figures.items():
        low, high = found["interval"]
        least, most = found["range"]
        table.row(way, found["seeds"], found["seconds_per_step"], found["cpu_seconds_per_step"],
                  f"{found['engines_idle']:.0%}", found["overlap_seconds_per_step"], found["staleness_mean"],
                  found["staleness_max"], f"{found['accuracy']:.3f}", f"{low:.3f}-{high:.3f}",
                  f"{least:.3f}-{most:.3f}", f"{found['greedy']:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
