"""GRPO-RoC against its rivals, on the quickstart's task or another: same cold starts, held-out problems and steps.

    python benchmarks/roc_ablation.py --out runs/ablation          # everything: about 45 minutes of CPU
    python benchmarks/roc_ablation.py --out runs/ablation --table  # only read what is there and print
    python benchmarks/roc_ablation.py --methods GRPO "RoC (paper)" --cold-seeds 0 --rl-seeds 10 11  # a part of it
    python benchmarks/roc_ablation.py --out runs/floor --methods "RoC (paper)" "RoC, no floor" --cold-seeds 0
                                                                   # at least one failure kept, or none (the paper)
    python benchmarks/roc_ablation.py --out runs/gsm8k --cold-recipe recipes/smollm2/gsm8k.toml \\
        --recipe recipes/ablations/roc_gsm8k.toml --methods GRPO "RoC (paper)" --cold-seeds 0 --at-once 4
                                                                   # a real model, on a GPU that has room for four

Every cell is one `rocstar train` in a process of its own; cells that are done are not run again. A cell keeps its
attempts (2 MB), and `rocstar analyze` reads them. Prints a table, the paper's Fig. 4 by step with its range over
runs, and last one JSON line; draws Fig. 4 and its neighbours into --out/pictures where matplotlib is installed.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from frame import Table, newest_model, parser, report, run_cell, slug

from rocstar.analysis.pictures import draw, failed_calls_in_right
from rocstar.analysis.report import analyse
from rocstar.analysis.sources import find_source
from rocstar.record.folder import read_json

METHODS = {
    "GRPO": ["resample.method=all", "rollout.attempts_per_problem=16"],
    "uniform from 2G": ["resample.method=uniform"],
    "RoC (paper)": ["resample.method=roc"],
    "RoC (release)": ["resample.method=roc_release"],
    "RoC, no floor": ["resample.method=roc", "resample.failure_floor=0"],
}
COMPARED = list(METHODS)[:4]
"""What runs where nothing else is asked for."""
Cell = dict[str, Any]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/ablation"))
    options.add_argument("--table", action="store_true", help="run nothing")
    options.add_argument("--cold-recipe", default="recipes/quickstart.toml", help="whose SFT the cold starts are")
    options.add_argument("--recipe", default="recipes/ablations/roc.toml", help="of the cells: RL alone")
    options.add_argument("--at-once", type=int, default=1, metavar="N", help="cells that run beside each other")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=COMPARED)
    options.add_argument("--cold-seeds", nargs="+", type=int, default=[0, 1])
    options.add_argument("--rl-seeds", nargs="+", type=int, default=[10, 11, 12])
    options.add_argument("--cold", nargs="*", default=[], help="further settings of the cold starts")
    options.add_argument("--rl", nargs="*", default=[], help="further settings of the cells")
    given = options.parse_args()
    out: Path = given.out.resolve()
    seeds = list(product(given.cold_seeds, given.rl_seeds))
    if not given.table:
        run_cells(out, given, seeds)
    runs = {method: done(out, method, seeds) for method in given.methods}
    cells = {method: [read_json(run / "summary.json") for run in found] for method, found in runs.items()}
    baseline = read_json(out / "no-tool" / "summary.json") if (out / "no-tool" / "summary.json").exists() else None
    print_table(cells, baseline)
    by_step = analysed({method: found for method, found in runs.items() if found}, out / "pictures")
    report(cells=cells, no_tool=baseline, methods=by_step)


def run_cells(out: Path, given: Namespace, seeds: list[tuple[int, int]]) -> None:
    for seed in given.cold_seeds:
        run_cell(out / f"cold-{seed}", "sft", given.cold_recipe, [f"run.seed={seed}", *given.cold])

    def run_one(cell: tuple[tuple[int, int], str]) -> None:
        (cold, seed), method = cell
        start = f"model.path={newest_model(out / f'cold-{cold}')}"
        settings = [start, f"run.seed={seed}", *METHODS[method], *given.rl]
        run_cell(out / cell_name(method, cold, seed), "train", given.recipe, settings)

    with ThreadPoolExecutor(given.at_once) as cells:
        list(cells.map(run_one, product(seeds, given.methods)))
    if set(COMPARED) <= set(given.methods):
        run_cell(out / "no-tool", "train", "recipes/ablations/no_tool.toml", [])


def cell_name(method: str, cold: int, seed: int) -> str:
    return f"{slug(method)}--cold{cold}-seed{seed}"


def done(out: Path, method: str, seeds: list[tuple[int, int]]) -> list[Path]:
    cells = (out / cell_name(method, cold, seed) for cold, seed in seeds)
    return [cell for cell in cells if (cell / "summary.json").exists()]


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-"


def print_table(cells: dict[str, list[Cell]], baseline: Cell | None) -> None:
    columns = {
        "sampled accuracy": lambda c: c["accuracy_after"]["value"],
        "greedy": lambda c: c["greedy_after"]["value"],
        "tool error in correct": lambda c: c["tool_error_share_in_correct_after"],
        "tokens": lambda c: c["tokens_after"],
    }
    print("mean (range) over runs, on the held-out problems, at the end")
    table = Table("", "runs", *columns, first=18, width=24)
    for method, rows in cells.items():
        table.row(method, len(rows), *(spread([figure(row) for row in rows]) for figure in columns.values()))
    if baseline:
        before, after = baseline["accuracy_before"]["value"], baseline["accuracy_after"]["value"]
        print(f"no tool, same size: {before:.3f} after SFT on right answers, {after:.3f} after RL")
    errors = {m: [c["tool_error_share_in_correct_after"] for c in rows] for m, rows in cells.items() if rows}
    if "GRPO" in errors and "RoC (paper)" in errors:
        ratio = fmean(errors["RoC (paper)"]) / fmean(errors["GRPO"])
        apart = max(errors["RoC (paper)"]) < min(errors["GRPO"])
        print(f"RoC / GRPO: {ratio:.2f} of the errors; ranges {'do not overlap' if apart else 'OVERLAP'}")


def analysed(runs: dict[str, list[Path]], pictures: Path) -> dict[str, Any]:
    """Print Fig. 4 of the cells, and draw what `rocstar analyze` draws; each method's values by step."""
    reports = {method: [analyse(find_source(str(run), run.parent)) for run in found] for method, found in runs.items()}
    curves: dict[str, dict[int, list[float]]] = {}
    print("\nfailed calls in right attempts, by step (Fig. 4): mean (range) over runs")
    for method, found in reports.items():
        points = sorted(point for one in found for point in failed_calls_in_right(one))
        values = curves[method] = {step: [value for at, value in points if at == step] for step, _ in points}
        print(f"{method}: " + ", ".join(f"{step}: {spread(some)}" for step, some in values.items()))
    if find_spec("matplotlib"):
        draw([one for found in reports.values() for one in found], pictures)
    else:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
    return curves


if __name__ == "__main__":
    main()
