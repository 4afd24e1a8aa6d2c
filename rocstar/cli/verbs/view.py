"""`rocstar view`: the local page over run folders. Loads no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import Runs
from rocstar.support.exits import need


def view(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUNS|RUN|EVAL]", help="A folder of runs, a run, or an evaluation.", show_default=False
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
    from rocstar.view.sources import Library

    library = Library.open(name, runs)
    serve(library, host=host, port=port, browser=browser, tell=lambda said: print(f"rocstar: {said}", file=sys.stderr))
