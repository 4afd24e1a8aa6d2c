"""`rocstar faults`: what a trainer makes of faults of its engine, tools, rewards, agents and disk."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json, quiet
from rocstar.support.exits import FAILED, OK

if TYPE_CHECKING:
    from rocstar.faults.kit import FaultFinding, Trainer


def faults(
    names: Annotated[list[str] | None, typer.Argument(metavar="[FAULT]...", help="Only these; default: all.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Say what each fault is, and stop.")] = False,
    trainer: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Another trainer, as docs/faults.md says; default: rocstar.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a trainer and see that none becomes a reward or reaches the model. Exit code 1 where one does.

    Example: rocstar faults engine-dies tools-hangs"""
    import asyncio

    from rocstar.faults.kit import FAULTS, examined, faults_named, refuse_unsound, trainer_of

    if show:
        for fault in FAULTS:
            print(f"{fault.name:24} {fault.sentence}")
        return
    chosen = faults_named(names or [], at_addresses=trainer is not None)
    quiet()
    trained = _own() if trainer is None else trainer_of(trainer)

    async def findings() -> list[FaultFinding]:
        usual = await refuse_unsound(trained)
        found = []
        for fault in chosen:
            print(f"{fault.name} ...", file=sys.stderr)
            found.append(await examined(trained, fault, usual=usual))
        return found

    found = asyncio.run(findings())
    kept = sum(one.as_promised for one in found)
    if as_json:
        print_json({"promised": kept, "faults": [asdict(one) for one in found]})
    else:
        _print(found)
        print(f"{kept} of {len(found)} faults were handled as promised")
    raise typer.Exit(OK if kept == len(found) else FAILED)


def _own() -> Trainer:
    from rocstar.faults.own import own_trainer

    return own_trainer


def _print(found: list[FaultFinding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("fault", no_wrap=True)
    for name in ("rewarded", "shown", "lost"):
        table.add_column(name, justify="right")
    table.add_column("run")
    for one in found:
        name = one.fault if one.as_promised else f"{one.fault} BROKEN"
        table.add_row(name, str(one.rewarded), str(one.shown), str(one.lost), one.run)
    Console(highlight=False, markup=False).print(table)
    for one in found:
        if one.words and (one.lost or one.run == "halted" or not one.as_promised):
            print(f"{one.fault}: {one.words}")
