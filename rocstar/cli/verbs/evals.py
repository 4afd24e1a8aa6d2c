"""`rocstar evals`: the evaluations that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json

app = typer.Typer(**STYLE, help="The evaluations that were kept.")


@app.callback()
def evals() -> None:
    """Keeps `list` a verb of its own while it is the only one."""


@app.command(name="list")
def list_all(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """All evaluations, by the name that compare, analyze, view and runs rollouts take."""
    from rocstar.record.evaluations import list_evaluations, row_of
    from rocstar.support.screen import Screen

    rows = list(map(row_of, list_evaluations(runs)))
    if as_json:
        print_json({"evaluations": rows})
    elif rows:
        Screen().evaluations(rows)
    else:
        Screen().note(f"there are no evaluations in {runs}; make one with rocstar eval")
