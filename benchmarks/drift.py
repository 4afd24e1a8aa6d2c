"""Does RL teach a model to read its tool? examples/drift under four methods, with the causal test of `analyze --swap`.

    python benchmarks/drift.py --out runs/drift           # everything: about an hour of one core
    python benchmarks/drift.py --out runs/drift --table   # only read what is there, print and draw
    python benchmarks/drift.py --cold-seeds 0 --rl-seeds 10 --methods GRPO "RoC (paper)"  # a part of it

A cell is one RL run from a cold start (a model, made once for each seed), and the swap test on its last evaluation.
Cells that are done are not made again and one that was stopped is resumed, so the script may be stopped at any time.
Two more kinds of cold start: `unread-0` was never shown reading; `chain-0` is a model of 1.1 million parameters that
follows three gauges under a cap of 120 tokens, which are just enough for six calls. Prints a table, and last one JSON
line; draws --out/drift.png where matplotlib is installed. Intervals are 95% by bootstrap over runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from frame import ROOT, Table, newest_model, parser, report

from rocstar.cli.main import run as command
from rocstar.record.atomic import write_json
from rocstar.record.folder import read_json
from rocstar.record.rollouts import read_table

RECIPE = ROOT / "examples" / "drift" / "drift.toml"
METHODS = {
    "GRPO": ["resample.method=all", "rollout.attempts_per_problem=8"],
    "uniform from 2G": ["resample.method=uniform"],
    "RoC (paper)": ["resample.method=roc"],
    "RoC (release)": ["resample.method=roc_release"],
}
TOOLS = {"can ask": "gauges:read", "cannot ask": "closed_gauges:read"}
COLD = {
    "": [],
    "unread": ["stage.teach.data.options.reading=0.0", "stage.dilute.data.options.reading=0.0"],
    "chain": [
        *("model.hidden_size=160", "model.num_layers=4", "model.num_heads=5", "model.intermediate_size=448"),
        *("sft.muon_learning_rate=0.01", "stage.teach.steps=150", "stage.dilute.data.options.asking=0.4"),
        *("stage.dilute.data.options.reading=0.7", "stage.dilute.data.options.giving_up=0.4"),
    ],
}
"""Settings of a kind of cold start."""
TASK = {"chain": ["data.options.chain=3", "rollout.max_turns=9", "rollout.max_response_tokens=120"]}
"""Settings of a kind for cold start and RL."""
RL_ONLY = ["stage.teach.steps=0", "stage.dilute.steps=0"]
SETTINGS = ["evaluate.problems=200", "evaluate.greedy=false", "run.save_rollouts=false"]
RESAMPLES = 4000  # of the bootstrap
FEWEST = 3  # runs that have an interval

Count = tuple[float, float]
"""(how many, of how many) in one run."""


@dataclass(frozen=True, slots=True)
class Cell:
    tool: str
    method: str
    cold: str
    """Seed of the cold start, after its kind where it is of one: 0, unread-0."""
    seed: int

    @property
    def kind(self) -> str:
        return self.cold.rpartition("-")[0]

    @property
    def name(self) -> str:
        text = f"{self.tool} {self.method} cold {self.cold} seed {self.seed}".lower()
        return "-".join("".join(c if c.isalnum() else " " for c in text).split())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, default=Path("runs/drift"))
    arguments.add_argument("--table", action="store_true", help="run nothing")
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    arguments.add_argument("--cold-seeds", nargs="+", default=["0", "1", "2"], help="or unread-0, chain-0")
    arguments.add_argument("--rl-seeds", nargs="+", type=int, default=[10, 11, 12, 13])
    arguments.add_argument("--steps", type=int, default=20, help="RL steps of a cell")
    arguments.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="for new cells")
    given = arguments.parse_intermixed_args()
    if unknown := [cold for cold in given.cold_seeds if cold.rpartition("-")[0] not in COLD]:
        arguments.error(
            f"--cold-seeds {unknown[0]}: write a seed, or {', '.join(f'{kind}-0' for kind in COLD if kind)}"
        )
    out: Path = given.out.resolve()
    grid = product(given.rl_seeds, given.cold_seeds, given.methods, given.tools)
    cells = [Cell(tool, method, cold, seed) for seed, cold, method, tool in grid]
    if not given.table:
        for number, cell in enumerate(cells):
            told = f"{time.strftime('%H:%M:%S')} cell {number + 1} of {len(cells)}: {cell.name}"
            print(told, file=sys.stderr, flush=True)
            carry_out(out, cell, [f"stage.learn.steps={given.steps}", *given.settings])
    done = [cell for cell in cells if (out / cell.name / "swap.json").exists()]
    rows = [row for tool in given.tools for row in rows_of(out, [cell for cell in done if cell.tool == tool])]
    print_table(rows)
    draw(rows, out / "drift.png")
    report(cells=len(done), rows=rows)


def carry_out(out: Path, cell: Cell, settings: Sequence[str]) -> None:
    folder = out / cell.name
    if (folder / "swap.json").exists():
        return
    cold = cold_start(out, cell.cold, cell.kind)
    chosen = [*RL_ONLY, *SETTINGS, *METHODS[cell.method], f'sandbox.tools=["{TOOLS[cell.tool]}"]', *settings]
    trained(folder, cell.seed, [f"model.path={cold}", *TASK.get(cell.kind, []), *chosen])
    whole = cell.method == next(iter(METHODS))  # all methods begin with the same model, so one shows what was before
    found = rocstar(folder / "swap.log", "analyze", str(folder) if whole else f"{folder}/after", "--swap", "--json")
    write_json(folder / "swap.json", json.loads(found))


def cold_start(out: Path, cold: str, kind: str) -> Path:
    """The model folder of a cold start, made where it is not there."""
    folder = out / f"cold-{cold}"
    settings = ["stage.learn.steps=0", *SETTINGS, *TASK.get(kind, []), *COLD[kind]]
    trained(folder, int(cold.rpartition("-")[2]), settings)
    return newest_model(folder)


def trained(folder: Path, seed: int, settings: Sequence[str]) -> None:
    if (folder / "summary.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    if folder.exists():
        rocstar(log, "train", "--resume", str(folder))
        return
    names = [f"run.folder={folder.parent}", f"run.name={folder.name}", f"run.seed={seed}"]
    rocstar(log, "train", str(RECIPE), *names, *settings)


def rocstar(log: Path, *arguments: str) -> str:
    """What it prints; in this process, which has loaded torch already. Exits where it fails."""
    said = io.StringIO()
    with log.open("w") as file, contextlib.redirect_stdout(said), contextlib.redirect_stderr(file):
        code = command(arguments)
    if code:
        sys.exit(f"rocstar {' '.join(arguments)} ended with exit code {code}; its message stands in {log}")
    return said.getvalue()


def rows_of(out: Path, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """A row for each method, before and after it, of the runs from one kind of cold start."""
    for kind in COLD:
        some = [cell for cell in cells if cell.kind == kind]
        began = [cell for cell in some if cell.method == next(iter(METHODS))]
        named = {"tool": some[0].tool, "kind": kind} if some else {}
        if began:
            yield {**named, "method": "before RL", **figures([counts(out / cell.name, "before") for cell in began])}
        for method in METHODS:
            if of := [cell for cell in some if cell.method == method]:
                yield {**named, "method": method, **figures([counts(out / cell.name, "after") for cell in of])}


def counts(run: Path, when: str) -> dict[str, Count]:
    """What one evaluation of a run shows, and its swap test."""
    (file,) = run.glob(f"evals/{when}/*/samples.parquet")
    rows = read_table(file, ["verdict", "failed_calls", "turns", "response_tokens"]).to_pylist()
    right = [row for row in rows if row["verdict"] == "right"]
    first = [calls[0] for row in rows if (calls := json.loads(row["turns"])[0]["calls"])]
    found: dict[str, Count] = {
        "right": (len(right), len(rows)),
        "right_with_failed_call": (sum(row["failed_calls"] > 0 for row in right), len(right)),
        "asks_first": (sum(call["arguments"].get("unit") == "?" for call in first), len(rows)),
        "tokens": (sum(row["response_tokens"] for row in rows), len(rows)),
    }
    for test in read_json(run / "swap.json")["swap"]:
        if f"/{when}@" in test["evaluation"]:
            for row in test["rows"]:
                if row["after"] == "failed call":
                    for name in ("true_word", "false_word", "calls"):
                        n = row[name]["n"]
                        found[f"{name}_when_{row['told']}"] = ((row[name]["value"] or 0) * n, n)
                    taken, again = (found[f"{name}_when_{row['told']}"][0] for name in ("false_word", "calls"))
                    found[f"false_word_of_calls_when_{row['told']}"] = (taken, again)
    return found


def figures(runs: Sequence[dict[str, Count]]) -> dict[str, Any]:
    """Each figure over all attempts of some runs, with its interval, and that of each run."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {"runs": len(runs), **{name: pooled([run[name] for run in runs if name in run]) for name in names}}


def pooled(parts: Sequence[Count]) -> dict[str, Any]:
    parts = [part for part in parts if part[1]]
    if not parts:
        return {"value": None, "interval": None, "runs": [], "n": 0}
    runs = [round(part / whole, 4) for part, whole in parts]
    found = {"value": _ratio(parts), "interval": None, "runs": runs, "n": sum(whole for _, whole in parts)}
    if len(parts) < FEWEST:
        return found
    rng = random.Random(0)
    drawn = sorted(_ratio(rng.choices(parts, k=len(parts))) for _ in range(RESAMPLES))
    return found | {"interval": [drawn[round(0.025 * RESAMPLES)], drawn[round(0.975 * RESAMPLES) - 1]]}


def _ratio(parts: Sequence[Count]) -> float:
    return sum(part for part, _ in parts) / sum(whole for _, whole in parts)


COLUMNS = {
    "right": "right",
    "false_word_when_false": "takes a false unit",
    "false_word_of_calls_when_false": "of those that call",
    "false_word_when_true": "the same untold",
    "right_with_failed_call": "failed call in right",
    "asks_first": "asks first",
    "tokens": "tokens",
}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("after a failed call that names another unit than the gauge's: how often the next call takes that unit")
    table = Table("", "runs", *COLUMNS.values(), first=34, width=22)
    for row in rows:
        name = ", ".join(part for part in (row["tool"], row["kind"], row["method"]) if part)
        table.row(name, row["runs"], *(shown(row[key]) for key in COLUMNS))


def shown(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return "-"
    if figure["interval"] is None:
        return f"{figure['value']:.3f}"
    low, high = figure["interval"]
    return f"{figure['value']:.3f} ({low:.3f}-{high:.3f})"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """How often a false unit is taken, and failed calls in right attempts, by method; the runs as points."""
    rows = [row for row in rows if not row["kind"]]
    if not rows or not find_spec("matplotlib"):
        reason = "matplotlib is not installed" if rows else "none of these runs is in it"
        print(f"no picture: {reason}", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    tools = list(dict.fromkeys(row["tool"] for row in rows))
    picture = Figure(figsize=(9.6, 3.6 * len(tools)), layout="constrained")
    titles = {
        "false_word_when_false": "told a false unit, the next call takes it",
        "right_with_failed_call": "right attempts with a failed call",
    }
    axes = picture.subplots(len(tools), len(titles), squeeze=False, sharey=True)
    for tool, line in zip(tools, axes, strict=True):
        for (key, title), ax in zip(titles.items(), line, strict=True):
            some = [row for row in rows if row["tool"] == tool and row[key]["value"] is not None]
            for place, row in enumerate(some):
                colour = "0.6" if row["method"] == "before RL" else f"C{place - 1}"
                ax.bar(place, row[key]["value"], color=colour, width=0.7, alpha=0.55)
                ax.vlines(place, *(row[key]["interval"] or 2 * [row[key]["value"]]), color="black", linewidth=1.5)
                ax.scatter([place + 0.28] * len(row[key]["runs"]), row[key]["runs"], s=7, color="black", alpha=0.5)
            ax.set_xticks(range(len(some)), [row["method"].replace(" (", "\n(") for row in some], fontsize=8)
            ax.set_title(f"{title} ({tool})", fontsize=9)
            ax.set_ylim(0, 1)
    picture.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
