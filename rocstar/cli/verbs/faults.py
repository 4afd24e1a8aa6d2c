"""`rocstar faults`: what a trainer makes of faults of its engine, tools, rewards, agents and disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json
from rocstar.support.exits import FAILED, OK, visible
from rocstar.support.signals import terminated_as_interrupted


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

    from rocstar.faults.kit import FAULTS, faults_named, findings, trainer_of

    chosen = faults_named(names or [], at_addresses=trainer is not None)
    if show:
        listed = {name: FAULTS[name] for name in chosen}
        print_json(listed) if as_json else print(*(f"{name:24} {what}" for name, what in listed.items()), sep="\n")
        return
    if trainer is None:
        from rocstar.faults.own import own_trainer
    with terminated_as_interrupted():  # else a trainer would outlive us
        found = asyncio.run(findings(trainer_of(trainer) if trainer is not None else own_trainer, chosen))
    kept = sum(one.as_promised for one in found)
    if as_json:
        print_json({"promised": kept, "faults": [asdict(one) for one in found]})
    else:
        print(f"{'fault':32} rewarded shown  lost run")
        for one in found:
            name = one.fault if one.as_promised else f"{one.fault} BROKEN"
            print(f"{name:32} {one.rewarded:8} {one.shown:5} {one.lost:5} {one.run}")
        for one in found:
            if one.words and (one.lost or one.run == "halted" or not one.as_promised):
                print(visible(f"{one.fault}: {one.words}"))
        print(f"{kept} of {len(found)} faults were handled as promised")
    raise typer.Exit(OK if kept == len(found) else FAILED)
