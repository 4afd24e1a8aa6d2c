"""`rocstar view`: the local page over run folders, and over rollouts that others wrote. Loads no torch."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import Runs
from rocstar.support.exits import need


def view(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUNS|RUN|EVAL|FILE]",
            help="A folder of runs, a run, an evaluation, or a file or folder of TRL, verl, verifiers or inspect_ai.",
        ),
    ] = None,
    runs: Runs = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; another than loopback takes a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8710,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")] = True,
) -> None:
    """Look at runs in the browser: curves, groups, attempts, evaluations, also while they are written.

    Example: rocstar view last"""
    need("view")
    from rocstar.view.app import serve
    from rocstar.view.others import opened_others
    from rocstar.view.sources import Library

    def tell(said: str) -> None:
        print(f"rocstar: {said}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="rocstar-view-") as folder:
        others = opened_others(Path(name), Path(folder), tell) if name else None
        library, cache = others or Library.open(name, runs), Path(folder) if others else None
        serve(library, host=host, port=port, browser=browser, tell=tell, cache=cache)
