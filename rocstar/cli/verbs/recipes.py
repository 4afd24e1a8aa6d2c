"""`rocstar recipes`: lists and copies the recipes that come with rocstar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json

app = typer.Typer(**STYLE, help="The recipes that come with rocstar.")


@app.command(name="list")
def list_all(as_json: AsJson = False) -> None:
    """Their names, and what each is for."""
    from rocstar.config.shipped import listed

    found = listed()
    if as_json:
        print_json({"recipes": found})
        return
    for name, purpose in found.items():
        print(f"{name:{max(map(len, found))}}  {purpose}")


@app.command()
def copy(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE]...", help="All of them where none is named.")
    ] = None,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to.")] = Path("recipes"),
) -> None:
    """Copy recipes, with those they extend, to change them.

    Example: rocstar recipes copy quickstart.toml --to mine"""
    from rocstar.config.shipped import copy as carry_out

    for place in carry_out(names or [], to):
        print(place)
