"""The recipes that come with rocstar: in a checkout its `recipes/`, in an installed package a copy of it."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import rocstar
from rocstar.errors import ConfigError

MODULE = re.compile(r'"(\w+):\w+"')
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


def recipes_folder() -> Path:
    """Raises ConfigError where they were not installed."""
    package = Path(rocstar.__file__).parent
    for folder in (package.parent / "recipes", package / "recipe_files"):
        if (folder / "quickstart.toml").is_file():
            return folder
    raise ConfigError(f"no recipes were installed with rocstar in {package}; take them from a checkout")


def listed() -> dict[str, str]:
    """Name -> purpose: the first sentence of the comment at its head."""
    folder = recipes_folder()
    return {str(file.relative_to(folder)): _purpose(file) for file in sorted(folder.rglob("*.toml"))}


def copy(names: list[str], to: Path) -> list[Path]:
    """Copy recipes, those they extend and the modules beside them that they name, to the same places below `to`; all of
    them if none is named. Returns the written files.

    Raises ConfigError for an unknown name and for an existing file, before anything is written."""
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
