"""`rocstar recipes`: lists and copies the recipes that come with rocstar."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json
from rocstar.errors import ConfigError

MODULE = re.compile(r'"(\w+):\w+"')
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
app = typer.Typer(**STYLE, help="The recipes that come with rocstar.")


@app.command(name="list")
def list_all(as_json: AsJson = False) -> None:
    """Their names, and what each is for."""
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
    for place in copied(names or [], to):
        print(place)


def listed() -> dict[str, str]:
    """Name -> purpose: the first sentence of the comment at its head."""
    from rocstar.config.layers import recipes_folder

    folder = recipes_folder()
    return {str(file.relative_to(folder)): _purpose(file) for file in sorted(folder.rglob("*.toml"))}


def copied(names: list[str], to: Path) -> list[Path]:
    """Copy recipes, those they extend and the modules beside them that they name, to the same places below `to`; all of
    them if none is named. Returns the written files.

    Raises ConfigError for an unknown name and for an existing file, before anything is written."""
    from rocstar.config.layers import recipes_folder

    folder, known = recipes_folder(), listed()
    names = [name if name.endswith(".toml") else f"{name}.toml" for name in names]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no recipe {name.removesuffix('.toml')}; there are {', '.join(known)}")
    recipes = {file for name in names or known for file in _with_those_it_extends(folder / name)}
    files = sorted(recipes | {module for recipe in recipes for module in _modules_beside(recipe)})
    places = [to / file.relative_to(folder) for file in files]
    for place in places:
        if place.exists():
            raise ConfigError(f"{place} already exists; copy to another folder with --to")
    for file, place in zip(files, places, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return places


def _with_those_it_extends(file: Path) -> Iterator[Path]:
    file = file.resolve()
    yield file
    above = tomllib.loads(file.read_text(encoding="utf-8")).get("extends")
    if above is not None:
        yield from _with_those_it_extends(file.parent / above)


def _modules_beside(recipe: Path) -> Iterator[Path]:
    """Python files in a recipe's folder that it names as in `"published:Gsm8k"`, and those that they import."""
    found, names = set[Path](), set(MODULE.findall(recipe.read_text(encoding="utf-8")))
    while names:
        files = {file for name in names if (file := recipe.parent.resolve() / f"{name}.py").is_file()} - found
        found |= files
        names = {name for file in files for name in IMPORTED.findall(file.read_text(encoding="utf-8"))}
    yield from found


def _purpose(file: Path) -> str:
    head = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        head.append(line.removeprefix("# "))
    first, stop, _ = " ".join(head).partition(". ")
    return first + ("." if stop else "")
