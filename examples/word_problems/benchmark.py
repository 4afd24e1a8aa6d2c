"""Real word problems: SVAMP and MAWPS after SFT and after RL, digits and masked apart, beside published figures.

    python examples/word_problems/benchmark.py [--only PART]... [--runs FOLDER] [--data FOLDER] [SECTION.KEY=VALUE]...

A real-data check, not a benchmark claim; README.md says what is measured and why it ends where it ends.
Each part is a run of `rocstar train word_problems.toml` in a process of its own. A run that is already in the
folder is gone on with, or only read when it is finished, so the parts can be run one at a time. Prints a table and
last one JSON line. Intervals are 95% over test problems; one seed each, so the variance of training is not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rocstar.config.recipe import resolved_from_json
from rocstar.evaluation.intervals import Estimate, mean_difference, mean_over_problems
from rocstar.record.folder import RunFolder
from rocstar.record.show import show_run
from rocstar.types import Problem
from word_problems.expressions import python_output
from word_problems.task import WordProblemTask

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("ROCSTAR_DATA", HERE.parents[2] / "shared" / "data")) / "word_problems"
RECIPE = HERE / "word_problems.toml"

SVAMP = ("mawps_asdiv_a_train.csv.gz", "svamp_test.csv.gz")
FOLDS = tuple((f"cv_mawps_fold{k}_train.csv.gz", f"cv_mawps_fold{k}_dev.csv.gz") for k in range(5))
# Five in six questions need all their numbers: no sentences that do not matter. Half of the rows: fewer steps, but with
# digits, where copying them takes longer to learn than the questions do (chosen on training questions set aside).
ALL_NUMBERS_NEEDED = ("data.options.decoy_share=0", "data.options.distractor_share=0")
FOLD_SETTINGS = {
    "masked": (*ALL_NUMBERS_NEEDED, "stage.sft.steps=600", "stage.rl.steps=20"),
    "digits": (
        *(*ALL_NUMBERS_NEEDED, "stage.sft.steps=900", "stage.rl.steps=40"),
        *("model.num_kv_heads=4", "data.options.same_length_share=0.8"),
    ),
}

# Patel et al., NAACL 2021: solvers without a pretrained encoder. MAWPS is their mean over five folds.
PUBLISHED = {
    "svamp": {"LSTM": 24.2, "GTS": 30.8, "Graph2Tree": 36.5},
    "mawps": {"LSTM": 79.7, "GTS": 82.6, "Graph2Tree": 83.7},
}


@dataclass(frozen=True, slots=True)
class Part:
    files: tuple[str, str]
    """Training file, test file."""
    numbers: str
    """`digits` or `masked`."""
    settings: tuple[str, ...] = ()

    @property
    def benchmark(self) -> str:
        return "svamp" if self.files == SVAMP else "mawps"

    @property
    def row(self) -> str:
        """Row of the table; the folds of MAWPS share one."""
        return f"{self.benchmark}-{self.numbers}"


# Copying digits is learned late when the text varies much: there only the numbers do.
DIGITS_SETTINGS = (
    *("data.options.wordings=1", "data.options.redraws=24"),
    *(f"data.options.{share}_share=0" for share in ("rename", "decoy", "shuffle", "distractor")),
)
SETTINGS: dict[str, tuple[str, ...]] = {"masked": (), "digits": DIGITS_SETTINGS}
PARTS = {f"svamp-{numbers}": Part(SVAMP, numbers, settings) for numbers, settings in SETTINGS.items()} | {
    f"mawps-{numbers}-fold{k}": Part(files, numbers, (*FOLD_SETTINGS[numbers], *settings))
    for numbers, settings in SETTINGS.items()
    for k, files in enumerate(FOLDS)
}
ABSOLUTE = re.compile(r"abs\(([\w.]+)-([\w.]+)\)")
MAX_OVER_MIN = re.compile(r"max\(([\w.]+),([\w.]+)\)/min\([\w.]+,[\w.]+\)")
NAME = re.compile(r"n\d+")
DEFAULT = ("svamp-masked", "svamp-digits", "mawps-masked-fold0", "mawps-masked-fold1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One part's attempts: share right by problem, repeated for each row of the file that is the problem."""

    problems: Sequence[Problem]
    shares: Mapping[tuple[str, str], Mapping[str, float]]
    """(`before` or `after`, `greedy` or `samples`) -> problem id -> share right. `as asked` in place of `greedy`: right
    also if abs(a-b) is read as a-b and max(a,b)/min(a,b) as a/b, so without Python's help with the order."""
    cpu_seconds: float


def main() -> None:
    arguments = parse_arguments()
    rows: dict[str, list[Results]] = {}
    for name in arguments.only or DEFAULT:
        part = PARTS[name]
        folder = carried_out(name, part, arguments)
        found = results_of(folder)
        print(f"{name}: {found.cpu_seconds:.0f} CPU seconds, {folder.path}", flush=True)
        rows.setdefault(part.row, []).append(found)
    figures = {name: figures_of(results) for name, results in rows.items()}
    for name, shown in figures.items():
        print_row(name, shown, len(rows[name]))
    print(
        "\nas asked: answers that need abs(a-b) or max(a,b)/min(a,b) count as wrong, since the equations that published"
    )
    print("solvers write cannot say that; strict, for a model trained to write equations would get some of these right")
    print(json.dumps({"benchmark": "word_problems", "published": PUBLISHED, "rows": figures}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(PARTS), help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "word_problems", help="folder for the runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the CSV files")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="for new runs; see docs/recipes.md")
    arguments = parser.parse_intermixed_args()
    if not arguments.data.is_dir():
        sys.exit(f"{arguments.data} does not exist; give the folder of the word problem files with --data")
    return arguments


def carried_out(name: str, part: Part, arguments: argparse.Namespace) -> RunFolder:
    """The part's finished run; exits with the run's own message when it fails."""
    path = arguments.runs / name
    train, test = (arguments.data / file for file in part.files)
    if (path / "summary.json").is_file():
        return RunFolder.open(path)
    if path.is_dir():
        command = ["--resume", str(path)]
    else:
        command = [
            str(RECIPE),
            f"run.name={name}",
            f"run.folder={arguments.runs}",
            f"data.train_files={train}",
            f"data.test_files={test}",
            f"data.options.numbers={part.numbers}",
            *part.settings,
            *arguments.settings,
        ]
    print("rocstar train", *command, flush=True)
    done = subprocess.run([sys.executable, "-m", "rocstar", "train", *command], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"{name} ended with exit code {done.returncode}; its message stands above")
    return RunFolder.open(path)


def results_of(folder: RunFolder) -> Results:
    recipe = resolved_from_json(folder.resolved)
    task = WordProblemTask(
        recipe.data, tool_name=recipe.rollout.tool_name, seed=recipe.run.seed, heldout=recipe.evaluate.problems
    )
    shares = {
        (when, how): shares_right(folder.evaluation(when, step) / f"{how}.parquet")
        for when, step, _ in folder.evaluations()
        for how in ("greedy", "samples")
    }
    problems = task.heldout()
    for when, step, _ in folder.evaluations():
        shares[when, "as asked"] = shares_as_asked(folder.evaluation(when, step) / "greedy.parquet", problems)
    seconds = sum(show_run(folder)["summary"]["cpu_seconds"].values())
    return Results(problems=problems, shares=shares, cpu_seconds=seconds)


def shares_right(file: Path) -> dict[str, float]:
    from pyarrow import parquet

    rewards: dict[str, list[float]] = {}
    for row in parquet.read_table(file, columns=["problem_id", "reward"], partitioning=None).to_pylist():
        if row["reward"] is not None:
            rewards.setdefault(row["problem_id"], []).append(row["reward"])
    return {name: fmean(values) for name, values in rewards.items()}


def shares_as_asked(file: Path, problems: Sequence[Problem]) -> dict[str, float]:
    from pyarrow import parquet

    by_id = {problem.id: problem for problem in problems}
    rows = parquet.read_table(file, columns=["problem_id", "reward", "turns"], partitioning=None).to_pylist()
    return {
        row["problem_id"]: float(
            row["reward"] > 0 and holds_as_asked(last_program(row["turns"]), by_id[row["problem_id"]])
        )
        for row in rows
        if row["reward"] is not None
    }


def last_program(turns: str) -> str:
    calls = [call for turn in json.loads(turns) for call in turn["calls"]]
    return str(calls[-1]["arguments"].get("code", "")) if calls else ""


def holds_as_asked(program: str, problem: Problem) -> bool:
    """Whether a right program stays right with its operands taken in the order in which they are written."""
    plain = MAX_OVER_MIN.sub(r"(\1/\2)", ABSOLUTE.sub(r"(\1-\2)", program))
    if plain == program:
        return True
    given = dict(pair.split("=") for pair in str(problem.metadata.get("given", "")).split(";") if pair)
    expression = NAME.sub(lambda name: given[name[0]].strip(), plain.removeprefix("print(").removesuffix(")"))
    value, wanted = float(python_output(expression)), float(problem.answer)
    return abs(value - wanted) <= 1e-3 * abs(wanted)


def figures_of(results: Sequence[Results]) -> dict[str, Any]:
    """Figures of one row of the table; the parts it is made of are pooled."""
    names = {f"{when}_{how}": (when, how) for when in ("before", "after") for how in ("greedy", "samples")}
    return {
        **{name: figure(accuracy(results, key)) for name, key in names.items()},
        **{f"{when}_as_asked": figure(accuracy(results, (when, "as asked"))) for when in ("before", "after")},
        "change_greedy": figure(change(results, "greedy")),
        "change_samples": figure(change(results, "samples")),
        "greedy_after_by": {name: figure(accuracy(results, ("after", "greedy"), of)) for name, of in SPLITS.items()},
        "greedy_before_by": {name: figure(accuracy(results, ("before", "greedy"), of)) for name, of in SPLITS.items()},
        "cpu_seconds": [round(part.cpu_seconds, 1) for part in results],
    }


SPLITS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "question also in training": lambda known: known["duplicate"],
    "new question": lambda known: not known["duplicate"],
    "one operator": lambda known: known["operators"] < 2,
    "two or more operators": lambda known: known["operators"] >= 2,
    "all numbers needed": lambda known: known["unused_numbers"] == 0,
    "some number not needed": lambda known: known["unused_numbers"] > 0,
}


def accuracy(
    results: Sequence[Results],
    key: tuple[str, str],
    of: Callable[[Mapping[str, Any]], bool] = lambda known: True,
) -> Estimate:
    """Over rows of the test file: a problem that stands in it twice counts twice, as in published figures."""
    return mean_over_problems(
        [
            part.shares[key][problem.id]
            for part in results
            for problem in part.problems
            if of(problem.metadata) and problem.id in part.shares[key]
            for _ in range(problem.metadata["rows"])
        ]
    )


def change(results: Sequence[Results], how: str) -> Estimate:
    """What RL changed, after minus before, on the same rows of the test file."""
    before, after = (
        {
            f"{number}/{problem.id}/{copy}": part.shares[when, how][problem.id]
            for number, part in enumerate(results)
            for problem in part.problems
            if problem.id in part.shares[when, how]
            for copy in range(problem.metadata["rows"])
        }
        for when in ("before", "after")
    )
    return mean_difference([after[name] - before[name] for name in sorted(before.keys() & after.keys())])


def figure(estimate: Estimate) -> dict[str, Any]:
    """An estimate in percent."""
    low, high = (round(100 * value, 1) for value in (estimate.low, estimate.high))
    return {"value": round(100 * estimate.value, 1), "interval": [low, high], "n": estimate.n}


def print_row(name: str, figures: Mapping[str, Any], parts: int) -> None:
    published = PUBLISHED[name.split("-")[0]]
    seconds = " + ".join(f"{value:.0f}" for value in figures["cpu_seconds"])
    print(f"\n{name} ({parts} run{'s' if parts > 1 else ''}, {seconds} CPU seconds)")
    print(f"  {'':28}{'after SFT':>22}{'after RL':>22}{'change by RL':>24}")
    for how, label in (("greedy", "greedy"), ("samples", "sampled, temperature 1")):
        cells = (figures[f"before_{how}"], figures[f"after_{how}"], figures[f"change_{how}"])
        print(f"  {label:28}" + "".join(f"{shown(cell):>23}" for cell in cells))
    as_asked = figures["before_as_asked"], figures["after_as_asked"]
    print(f"  {'greedy, as asked (see below)':28}" + "".join(f"{shown(cell):>23}" for cell in as_asked))
    for split in SPLITS:
        before, after = figures["greedy_before_by"][split], figures["greedy_after_by"][split]
        if before["n"]:
            label = f"{split} ({before['n']})"
            print(f"  {label:36}{shown(before):>15}{shown(after):>23}")
    ours = figures["after_greedy"]["value"]
    for solver, value in published.items():
        print(f"  published {solver:18}{value:>22}   ours {'below' if ours < value else 'not below'}")


def shown(cell: Mapping[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['value']:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
