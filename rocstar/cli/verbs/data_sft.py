"""`rocstar data sft`: a mix of SFT rows from published sets. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rocstar.cli.verbs.common import AsJson, print_json, stoppable


def sft(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML recipe of sources and weights.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where rows and datasheet go.")],
    as_json: AsJson = False,
) -> None:
    """Build SFT rows: many layouts into one JSON form, checked, capped, mixed; refused rows with their reasons.

    Example: rocstar data sft recipes/data/sft_mix.toml --out sft"""
    import os

    from rocstar.config.layers import load
    from rocstar.data.sft.build import build
    from rocstar.data.sft.recipe import MixRecipe
    from rocstar.protocols import ToolSpec
    from rocstar.support.screen import Screen
    from rocstar.tools.python import DESCRIPTION, NAMES, PARAMETERS

    tool = ToolSpec(name=NAMES[0], description=DESCRIPTION, parameters=PARAMETERS)
    kept = f"stopped; what is in {out} is as it was, and answers of an endpoint are kept; the same command begins again"
    mix = load(recipe, MixRecipe)
    with stoppable(kept), Screen() as screen, screen.never_silent(screen.working):
        sheet = build(mix, out, code_tool=tool, environment=os.environ, note=screen.note)
    print_json(sheet) if as_json else _print_table(sheet, out)


def _print_table(sheet: Mapping[str, Any], out: Path) -> None:
    columns = ("read", "conversations", "refused", "built", "calls", "p50", "p95", "max", "wanted", "taken", "short")
    print(f"{'source':16}" + "".join(f"{name:>14}" for name in columns))
    for source in sheet["sources"]:
        print(f"{source['name']:16}" + "".join(f"{value:>14}" for value in _cells(source)))
    for source in sheet["sources"]:
        for reason, count in source["refused"].items():
            print(f"{source['name']}: {count} refused for {reason}")
    print(f"{sheet['rows']} rows in {out / 'rows.jsonl'}, sha256 {sheet['rows_sha256'][:16]}...")


def _cells(source: Mapping[str, Any]) -> list[Any]:
    lengths = [source["tokens"].get(name, "-") for name in ("p50", "p95", "max")]
    return [
        source["rows_read"],
        source["conversations"],
        sum(source["refused"].values()),
        source["built"],
        source["calls_validated"],
        *lengths,
        source["wanted"],
        source["taken"],
        source["short"],
    ]
