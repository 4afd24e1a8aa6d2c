"""GRPO-RoC against its rivals on the quickstart's task: same cold starts, same held-out problems, same number of steps.

    python benchmarks/roc_ablation.py --out runs/ablation          # everything: about 45 minutes of CPU
    python benchmarks/roc_ablation.py --out runs/ablation --table  # only read what is there and print

Every cell is one `rocstar train` in a process of its own; cells that are done are not run again. Prints a table and
last one JSON line; draws `roc_ablation.png` into --out where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

METHODS = {
    "GRPO": ["resample.method=all", "rollout.attempts_per_problem=16"],
    "uniform from 2G": ["resample.method=uniform"],
    "RoC (paper)": ["resample.method=roc"],
    "RoC (release)": ["resample.method=roc_release"],
}
COLD_SEEDS = (0, 1)
RL_SEEDS = (10, 11, 12)
ROOT = Path(__file__).resolve().parent.parent
Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    if not arguments.table:
        run_everything(out)
    cells = read_cells(out)
    baseline = read_summary(out / "no-tool")
    print_table(cells, baseline)
    draw(out)
    print(json.dumps({"cells": cells, "no_tool": baseline}))


def run_everything(out: Path) -> None:
    for cold in COLD_SEEDS:
        rocstar(out / f"cold-{cold}", "sft", "recipes/quickstart.toml", [f"run.seed={cold}"])
        for seed in RL_SEEDS:
            for method, settings in METHODS.items():
                start = f"model.path={newest_model(out / f'cold-{cold}')}"
                folder = out / cell_name(method, cold, seed)
                rocstar(folder, "train", "recipes/ablations/roc.toml", [start, f"run.seed={seed}", *settings])
    rocstar(out / "no-tool", "train", "recipes/ablations/no_tool.toml", [])


def cell_name(method: str, cold: int, seed: int) -> str:
    slug = "".join(c if c.isalnum() else "-" for c in method.lower()).strip("-")
    return f"{slug}--cold{cold}-seed{seed}"


def newest_model(run: Path) -> Path:
    return max(run.glob("checkpoints/step=*")) / "model"


def rocstar(folder: Path, verb: str, recipe: str, settings: list[str]) -> None:
    """One run in its own process; nothing when it is already there. Raises CalledProcessError."""
    if (folder / "summary.json").exists():
        return
    print(f"running {folder.name}", file=sys.stderr, flush=True)
    names = [f"run.folder={folder.parent}", f"run.name={folder.name}"]
    command = [sys.executable, "-m", "rocstar", verb, recipe, *names, *settings, "--json"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def read_summary(folder: Path) -> Cell | None:
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def read_cells(out: Path) -> dict[str, list[Cell]]:
    found = {
        method: [read_summary(out / cell_name(method, cold, seed)) for cold in COLD_SEEDS for seed in RL_SEEDS]
        for method in METHODS
    }
    return {method: [cell for cell in cells if cell] for method, cells in found.items()}


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-"


def print_table(cells: dict[str, list[Cell]], baseline: Cell | None) -> None:
    columns = {
        "sampled accuracy": lambda c: c["accuracy_after"]["value"],
        "greedy": lambda c: c["greedy_after"]["value"],
        "tool error in correct": lambda c: c["tool_error_share_in_correct_after"],
        "tokens": lambda c: c["tokens_after"],
    }
    print("mean (range) over runs, on 400 held-out problems, at the end")
    print(f"{'':18}{'runs':>5}" + "".join(f"{name:>26}" for name in columns))
    for method, rows in cells.items():
        print(f"{method:18}{len(rows):>5}" + "".join(f"{spread([f(r) for r in rows]):>26}" for f in columns.values()))
    if baseline:
        before, after = baseline["accuracy_before"]["value"], baseline["accuracy_after"]["value"]
        print(f"no tool, same size: {before:.3f} after SFT on right answers, {after:.3f} after RL")
    errors = {m: [c["tool_error_share_in_correct_after"] for c in rows] for m, rows in cells.items() if rows}
    if "GRPO" in errors and "RoC (paper)" in errors:
        ratio = fmean(errors["RoC (paper)"]) / fmean(errors["GRPO"])
        apart = max(errors["RoC (paper)"]) < min(errors["GRPO"])
        print(f"RoC / GRPO: {ratio:.2f} of the errors; ranges {'do not overlap' if apart else 'OVERLAP'}")


def draw(out: Path) -> None:
    """Share of correct attempts with a failed call, over training, one line a run."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (errors, accuracy) = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True)
    for number, method in enumerate(METHODS):
        curves = [read_curves(out / cell_name(method, cold, seed)) for cold in COLD_SEEDS for seed in RL_SEEDS]
        for place, (steps, shares, rewards) in enumerate(curve for curve in curves if curve[0]):
            label = method if place == 0 else None
            errors.plot(steps, shares, color=f"C{number}", alpha=0.6, linewidth=1, label=label)
            accuracy.plot(steps, rewards, color=f"C{number}", alpha=0.6, linewidth=1)
    errors.set(xlabel="RL step", title="right attempts with a failed call", ylim=(0, None))
    accuracy.set(xlabel="RL step", title="right attempts", ylim=(0, 1))
    errors.legend()
    figure.tight_layout()
    figure.savefig(out / "roc_ablation.png", dpi=120)


def read_curves(run: Path) -> tuple[list[int], list[float], list[float]]:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row.get("tool/error_share_in_correct") is not None]
    return (
        [row["step"] for row in rows],
        [row["tool/error_share_in_correct"] for row in rows],
        [row["reward/mean"] for row in rows],
    )


if __name__ == "__main__":
    main()
