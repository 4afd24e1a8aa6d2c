"""`rocstar doctor`: what this machine can do, and what to do where something is missing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json, quiet
from rocstar.support.exits import NOT_READY


def doctor(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that would hold the runs.")] = Path("runs"),
) -> None:
    """Say what this machine can do: packages, GPUs, sandbox, disk, ports. Exit code 3 where training can't run."""
    quiet()
    from rocstar.cli.doctor import State, findings

    found = []
    for finding in findings(runs):
        found.append(finding)
        if not as_json:
            print(f"{finding.state:8} {finding.name}: {finding.found}")
            if finding.remedy:
                print(f"{'':8} -> {finding.remedy}")
    if as_json:
        print_json({"findings": [asdict(finding) for finding in found]})
    needed = ("packages", "packages [train]", "sandbox")
    if any(finding.state is State.MISSING and finding.name in needed for finding in found):
        raise typer.Exit(NOT_READY)
