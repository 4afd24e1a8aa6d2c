"""`rocstar sweep`: all combinations of some settings and seeds, one run after another, and one table of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json, stop, stoppable
from rocstar.errors import ConfigError
from rocstar.support.exits import FAILED, need

if TYPE_CHECKING:
    from rocstar.analysis.sweep import SweptRun


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML recipe.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE[,VALUE]...]...",
            help="Settings to change; several values, or a range as 0..2, are swept. run.name names the sweep.",
        ),
    ] = None,
    only: Annotated[int | None, typer.Option(metavar="N", help="Only this run, as --dry-run numbers them.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and how they stand, and stop.")] = False,
    as_json: AsJson = False,
    runs: Annotated[
        Path | None, typer.Option("--runs", help="Folder of the runs; default: the recipe's run.folder.")
    ] = None,
) -> None:
    """Make all runs, one after another, or go on with those that are not finished; then print their table.

    Example: rocstar sweep recipes/quickstart.toml learning.learning_rate=2e-4,4e-4 run.seed=0..2"""
    from rocstar.analysis.sweep import planned

    given = [*(settings or []), *([f"run.folder={runs}"] if runs else [])]
    all_runs = planned(recipe, given)
    if only is not None and not 0 <= only < len(all_runs):
        raise ConfigError(f"--only {only} is none of the {len(all_runs)} runs, which are numbered from 0")
    chosen = all_runs if only is None else [all_runs[only]]
    if dry_run:
        rows = [{"name": one.recipe.run.name, "state": one.state, "settings": list(one.swept)} for one in chosen]
        if as_json:
            print_json({"sweep": chosen[0].recipe.run.sweep, "runs": rows})
            return
        for number, row in enumerate(rows):
            print(f"{number:3}  {row['state']:9} {row['name']}")
        print(f"{len(rows)} runs", file=sys.stderr)
    else:
        need("train")
        failed = _make(chosen, recipe)
        print_sweep(str(all_runs[0].recipe.run.sweep), Path(all_runs[0].recipe.run.folder), as_json=as_json)
        if failed:
            sentence = f"{len(failed)} of {len(chosen)} runs failed: {', '.join(failed)}"
            stop(FAILED, f"{sentence}; give the command again to go on with them")


def _make(runs: Sequence[SweptRun], recipe: str) -> list[str]:
    """Names of those that failed."""
    from rocstar.analysis.sweep import carry_out

    failed = []
    for number, one in enumerate(runs, 1):
        name = one.recipe.run.name
        if one.state == "finished":
            print(f"run {number} of {len(runs)}: {name} is finished", file=sys.stderr)
            continue
        print(f"run {number} of {len(runs)}: {name}", file=sys.stderr)
        with stoppable(f"stopped in run {number} of {len(runs)}; the same command goes on"):
            if code := carry_out(one.command(recipe)):
                failed.append(name)
                print(f"run {name} failed (exit code {code}); the others go on", file=sys.stderr)
    return failed


def print_sweep(name: str, runs: Path, *, as_json: bool) -> None:
    """For each setting the mean, the range and the 95% interval over seeds of what finished runs came to."""
    from rocstar.analysis.sweep import came_to, swept_runs
    from rocstar.support.screen import Screen

    found = came_to(name, swept_runs(name, runs))
    print_json(found) if as_json else Screen().sweep(found)
