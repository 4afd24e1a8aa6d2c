"""Methods of learning against each other: one cold start a seed, the same held-out problems, equal sampled tokens.

    python benchmarks/arena.py --out runs/arena                        # the quickstart's task: about an hour of CPU
    python benchmarks/arena.py --out runs/arena --task errors --methods RoC GRPO "RoC, 20% forks" --seeds 0 1 2
    python benchmarks/arena.py --out runs/arena --task errors --table  # only read what is there and print
    python benchmarks/arena.py --out runs/arena --task words --methods RoC GRPO "RoC, RLOO" "RoC, Dr. GRPO" --seeds 0
    python benchmarks/arena.py --out runs/board --board                # CPU seconds until the quickstart is at 95%

Every cell is one `rocstar train` in a process of its own that ends with the step in which its attempts have --tokens
tokens of the model; cells that are done are not made again. A method's figures are held-out accuracy (sampled), less
that of RoC from the same cold start: seeds are paired, and the interval is Student's over seeds. All have the learning
rate and the four updates a step of the task, and what the method's paper says of its bounds: none is tuned. Prints a
table, writes it as data and, where matplotlib is installed, draws it into --out; last one JSON line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from frame import Table, data_folder, newest_model, parser, read_rows, report, require_settings, run_cell, slug

from rocstar.evaluation.intervals import student_interval
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder, read_json


class Task(NamedTuple):
    """What is learnt: a cold start, and RL from it."""

    keep: int  # attempts of a group that RoC keeps, and that GRPO draws
    sft: str = "recipes/quickstart.toml"
    rl: str = "recipes/ablations/roc.toml"
    cold: Sequence[str] = ()
    both: Sequence[str] = ()


WORDS = "recipes/smollm2/word_problems.toml"
TASKS: Mapping[str, Task] = {
    "quickstart": Task(16),
    "errors": Task(16, cold=["data.demo_mix=majority_right"]),  # half of its right attempts have a failed call
    "rare": Task(16, cold=["stage.sft.steps=150"]),  # so short a cold start that one attempt in twenty is right
    "words": Task(  # a real language model: SmolLM2-135M, with so short a cold start that much is left to learn
        *(6, WORDS, WORDS),
        cold=["stage.sft.steps=10"],
        both=["rollout.refill=0", "data.test_files=[]", "data.options.holdout=250", "evaluate.problems=250"],
    ),
}
LEARNT_FROM = "mawps_asdiv_a_train.csv.gz"  # by `words`, of $ROCSTAR_DATA/word_problems
BASE = "RoC"
METHODS: Mapping[str, Sequence[str]] = {
    BASE: [],
    "GRPO": ["resample.method=all", "rollout.attempts_per_problem={keep}"],
    "uniform from 2G": ["resample.method=uniform"],
    "RoC (release)": ["resample.method=roc_release"],
    "RoC, RLOO": ["learning.advantage=rloo"],
    "RoC, Dr. GRPO": ["learning.normalize_by_std=false"],
    "RoC, CISPO": ["learning.loss=cispo"],
    "RoC, SAPO": ["learning.loss=sapo", "learning.loss_mean=attempts"],
    "RoC, GSPO": [
        *("learning.loss=gspo", "learning.loss_mean=attempts"),
        *("learning.clip_low=3e-4", "learning.clip_high=4e-4"),
    ],
    "RoC, DPPO": ["learning.loss=dppo_tv"],
    "RoC, 20% forks": ["learning.top_entropy_share=0.2"],
    "RoC, refill": ["rollout.refill=2"],
}
NAMES = f"each one argument: {', '.join(map(repr, METHODS))}".replace("%", "%%")
MOST_STEPS = 200
FIGURES = ("sampled", "gain", "greedy", "errors", "steps", "cpu")
Cell = dict[str, Any]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("runs/arena"))
    options.add_argument("--task", choices=TASKS, default="quickstart")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=NAMES)
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options.add_argument("--tokens", type=int, default=100_000, help="sampled tokens of each run (%(default)s)")
    options.add_argument("--settings", nargs="*", default=[], help="of all runs, such as model.dtype=bfloat16")
    options.add_argument("--table", action="store_true", help="run nothing")
    options.add_argument("--board", action="store_true", help="the quickstart's own run instead, to 95%%")
    given = options.parse_args()
    out: Path = given.out.resolve()
    if given.board:
        report(board=board(out, given.seeds, run=not given.table))
        return
    if not given.table:
        for seed in given.seeds:
            run_seed(out, given.task, seed, given.methods, given.settings, given.tokens)
    asked = [f"stage.stage1.end.sampled_tokens={given.tokens}", *given.settings]
    cells = {name: done(out, given.task, name, given.seeds, asked) for name in given.methods}
    rows = [summary(name, found, cells.get(BASE, {})) for name, found in cells.items() if found]
    print_table(given.task, rows)
    write_json(out / f"{given.task}.json", rows)
    if find_spec("matplotlib"):
        draw(out / f"{given.task}.png", rows)
    report(task=given.task, tokens=given.tokens, methods=rows)


# -- runs ------------------------------------------------------------------------------------------------------------


def run_seed(out: Path, name: str, seed: int, methods: Sequence[str], settings: Sequence[str], tokens: int) -> None:
    task = TASKS[name]
    both = [f"run.seed={seed}", *task.both, *settings]
    if name == "words":
        both.append(f"data.train_files={json.dumps([str(data_folder('word_problems') / LEARNT_FROM)])}")
    cold = out / f"{name}-cold-{seed}"
    run_cell(cold, "sft", task.sft, [*both, *task.cold])
    only_rl = ["stage.sft.steps=0", "stage.stage2.steps=0", "stage.stage3.steps=0"]
    stage = [f"stage.stage1.steps={MOST_STEPS}", f"stage.stage1.end.sampled_tokens={tokens}"]
    given = [f"model.path={newest_model(cold)}", *both, "learning.updates_per_step=4", *only_rl, *stage]
    for method in methods:
        own = [setting.format(keep=task.keep) for setting in METHODS[method]]
        run_cell(cell(out, name, method, seed), "train", task.rl, [*given, *own])


def cell(out: Path, task: str, method: str, seed: int) -> Path:
    return out / f"{task}-{slug(method)}-{seed}"


def done(out: Path, task: str, method: str, seeds: Sequence[int], asked: Sequence[str]) -> dict[int, Cell]:
    """Figures of a method's finished runs, by seed. Raises SystemExit for one without the settings `asked`."""
    runs = {seed: cell(out, task, method, seed) for seed in seeds}
    finished = {seed: run for seed, run in runs.items() if (run / "summary.json").exists()}
    for run in finished.values():
        require_settings(run, asked)
    return {seed: figures(run) for seed, run in finished.items()}


def figures(run: Path) -> Cell:
    summary = read_json(run / "summary.json")
    return {
        "before": summary["accuracy_before"]["value"],
        "sampled": summary["accuracy_after"]["value"],
        "greedy": summary["greedy_after"]["value"],
        "errors": summary["tool_error_share_in_correct_after"],
        "steps": sum(1 for _ in read_rows(run / "metrics.jsonl")),
        "cpu": sum(seconds for phase, seconds in summary["cpu_seconds"].items() if phase != "evaluation"),
    }


# -- what they come to -----------------------------------------------------------------------------------------------


def summary(name: str, cells: Mapping[int, Cell], base: Mapping[int, Cell]) -> dict[str, Any]:
    """Means over seeds; `gain` is sampled accuracy less that of RoC with the same seed, with its 95% interval."""
    gains = [cells[seed]["sampled"] - base[seed]["sampled"] for seed in cells if seed in base]
    means = {key: fmean(one[key] or 0.0 for one in cells.values()) for key in ("before", *FIGURES) if key != "gain"}
    interval = student_interval(gains) if name != BASE else None
    by_seed = {seed: one["sampled"] for seed, one in cells.items()}
    return {"method": name, "runs": len(cells), **means, "gain": fmean(gains), "interval": interval, "by_seed": by_seed}


def print_table(task: str, rows: Sequence[Mapping[str, Any]]) -> None:
    start = fmean(row["before"] for row in rows)
    print(f"{task}: means over seeds on held-out problems; {start:.1%} right before; gain is over RoC, paired")
    table = Table("", "runs", "sampled", "gain", "paired 95% interval", "greedy", "errors", "steps", "CPU s", first=18)
    for row in sorted(rows, key=lambda row: -row["sampled"]):
        between = "{:+.1%} to {:+.1%}".format(*row["interval"]) if row["interval"] else "-"
        after = [f"{row['gain']:+.1%}", between, f"{row['greedy']:.1%}", f"{row['errors']:.1%}", round(row["steps"], 1)]
        table.row(row["method"], row["runs"], f"{row['sampled']:.1%}", *after, round(row["cpu"]))


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each method's runs as points, its mean as a line, the best above."""
    from matplotlib.figure import Figure

    ordered = sorted(rows, key=lambda row: row["sampled"])
    figure = Figure(figsize=(7, 0.32 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(ordered):
        axes.plot(list(row["by_seed"].values()), [place] * row["runs"], "o", color="tab:blue", alpha=0.5, markersize=4)
        axes.plot([row["sampled"]] * 2, [place - 0.3, place + 0.3], color="tab:blue", linewidth=2)
    axes.set_yticks(range(len(rows)), [row["method"] for row in ordered])
    axes.set_xlabel("held-out accuracy, sampled, at equal sampled tokens")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


# -- the board -------------------------------------------------------------------------------------------------------


def board(out: Path, seeds: Sequence[int], *, run: bool) -> dict[int, float | None]:
    """CPU seconds of the quickstart from its first process to the first evaluation at which 95% of 400 held-out
    problems are right (sampled), evaluations left out; evaluated every second RL step."""
    stages = [f"stage.stage{n}.{rule}" for n in (1, 2, 3) for rule in ("end.reward_gain=-1.0", "steps=24")]
    settings = ["evaluate.every_steps=2", "evaluate.greedy=false", "stage.stage2.end.solved_share=0.99", *stages]
    found = {}
    for seed in seeds:
        folder = out / f"board-{seed}"
        if run:
            run_cell(folder, "train", "recipes/quickstart.toml", [f"run.seed={seed}", *settings])
        found[seed] = seconds_to(folder, 0.95)
        print(f"seed {seed}: {found[seed]} CPU s to 95%", flush=True)
    return found


def seconds_to(run: Path, accuracy: float) -> float | None:
    """None where it never came to that."""
    reached = [
        step
        for name, step, result in RunFolder(run).evaluations()
        if name == "during" and result["accuracy"]["value"] >= accuracy
    ]
    if not reached:
        return None
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] <= reached[0]]
    spent = sum(row[key] for row in rows for key in row if key.startswith("cpu/") and key != "cpu/evaluation")
    return round(float(spent), 1)


if __name__ == "__main__":
    main()
