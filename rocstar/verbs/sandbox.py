"""`rocstar sandbox ...`: the code execution service on its own. Nothing here loads torch."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from rocstar.exits import FAILED, OK
from rocstar.verbs.common import STYLE, AsJson, print_json, write

app = typer.Typer(**STYLE, help="The place where the model's programs run.")


@app.command(name="exec")
def execute(
    code: Annotated[str, typer.Argument(metavar="CODE", help="A Python program; `-` reads it from stdin.")],
    as_json: AsJson = False,
) -> None:
    """Run one program in the sandbox and say what became of it.

    Example: rocstar sandbox exec 'sum(range(10))'"""
    from rocstar.sandbox.client import run_once

    response = run_once(sys.stdin.read() if code == "-" else code)
    if as_json:
        print_json(asdict(response))
    else:
        note = f"[{response.outcome}, {response.run_seconds:.3f} s, isolation {response.isolation}]\n"
        value = "" if response.value is None else f"{response.value}\n"
        write(sys.stdout, response.stdout + value)
        write(sys.stderr, response.stderr + note)
    raise typer.Exit(OK if response.outcome == "ok" else FAILED)
