"""Reads TOML files and the overrides of a command line into one typed tree. The rules, the same for every recipe:

- `extends = "other.toml"` names a parent, relative to the file that names it; chains are allowed, circles are refused.
- Sections merge key by key, the child's value wins; a list replaces a list.
- An entry of a list of tables (`[[stage]]`, `[[source]]`) has a name; one whose name a parent also has changes that
  entry key by key, any other is appended.
- `section.key=value` and `stage.NAME.key=value` are applied last, in the order given. A value is TOML, else plain text;
  `none` unsets.
- A single text where a list is expected is a list of one.

Not here: the meaning of keys (the models), and messages about mistakes (`complaint.py`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import rocstar
from rocstar.config.complaint import Layer, Override, complaint, find_line
from rocstar.config.tree import Model, Table, annotation_at, lists_tables, merged, named, put, with_lists
from rocstar.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def load(path: str | Path, model: type[T], overrides: Sequence[str] = ()) -> T:
    """The typed tree of a file. Raises ConfigError, which names file and line (or the override) and the nearest key.
    Source: ours."""
    layers = read_layers(Path(path), model)
    table = merge_layers(layers)
    changes = [parse_override(text, model, table) for text in overrides]
    changed = reduce(lambda so_far, change: put(so_far, change.keys, change.value), changes, table)
    return validated(model, changed, layers, changes)


def validated(model: type[T], table: Table, layers: Sequence[Layer], changes: Sequence[Override]) -> T:
    """`table` as `model`. `layers` and `changes`: its sources. Raises ConfigError."""
    try:
        return model.model_validate(with_lists(model, table), strict=True)
    except ValidationError as error:
        raise ConfigError(complaint(error, model, table, layers, changes)) from None


def merge_layers(layers: Sequence[Layer]) -> Table:
    return reduce(merged, (layer.table for layer in layers), Table())


# Files


def read_layers(path: Path, model: Model, children: tuple[Path, ...] = ()) -> list[Layer]:
    """The file with what it extends, parents first, `path` last. Raises ConfigError."""
    if path.resolve() in {child.resolve() for child in children}:
        chain = " -> ".join(str(link) for link in (*children, path))
        raise ConfigError(f"{chain}: these recipes extend each other in a circle; remove one `extends`")
    text = read_text(path)
    table = _parse(path, text)
    parent = table.pop("extends", None)
    _check_entries(path, table, model)
    layer = Layer(path=path, text=text, table=table)
    if parent is None:
        return [layer]
    line = find_line(text, ("extends",))
    if not isinstance(parent, str):
        raise ConfigError(f"{path} line {line}: extends takes one file name in quotes, got {parent!r}")
    if not (path.parent / parent).is_file():
        raise ConfigError(f"{path} line {line}: extends: {_not_found(path.parent / parent)}")
    return [*read_layers(path.parent / parent, model, (*children, path)), layer]


def read_text(path: Path) -> str:
    """The text of a recipe. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(_not_found(path)) from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read ({error.strerror}); give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _not_found(path: Path) -> str:
    there = Path("recipes").rglob("*.toml"), path.parent.glob("*/*.toml"), path.parent.glob("*.toml")
    recipes = {file.name: str(file) for some in there for file in sorted(some)}
    candidate = path.with_name(path.name.removesuffix(".toml") + ".toml")  # a bare `quickstart` is meant as its file
    ours = candidate.as_posix().removeprefix("recipes/")
    if candidate.name not in recipes and (recipes_folder() / ours).is_file():
        return f"there is no recipe {path}; rocstar recipes copy {ours.removesuffix('.toml')} writes recipes/{ours}"
    close = difflib.get_close_matches(candidate.name, recipes, n=1, cutoff=0.5)
    hint = f"did you mean {recipes[close[0]]}?" if close else "give the path of a TOML recipe"
    return f"there is no recipe {path}; {hint}"


def _parse(path: Path, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).partition(" (at ")
        line = re.match(r"line \d+", place)
        raise ConfigError(f"{path} {line.group() if line else 'at its end'}: not valid TOML: {reason}") from None
    except (RecursionError, ValueError) as error:  # lists in lists without end, an integer of thousands of digits
        raise ConfigError(f"{path}: a value is nested too deep or too long to be read ({error})") from None


def _check_entries(path: Path, table: Table, model: Model) -> None:
    for key, field in model.model_fields.items():
        if key not in table or not lists_tables(field.annotation):
            continue
        entries = table[key]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ConfigError(f"{path}: {key} is written as [[{key}]], with two brackets")
        names = [entry.get("name") for entry in entries]
        for number, name in enumerate(names, 1):
            if not isinstance(name, str) or names.index(name) != number - 1:
                fault = f"is called {name!r} like another" if isinstance(name, str) else "has no name"
                raise ConfigError(f"{path}: [[{key}]] number {number} {fault}; give each {key} a name of its own")


# Overrides


def parse_override(text: str, model: Model, table: Table) -> Override:
    """`section.key=value`, with the names of the entries in `table`. Raises ConfigError."""
    name, equals, raw = text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    if lists_tables(annotation_at(model, table, keys[:1])):
        _check_entry(text, keys[0], keys[1:], table)
    return Override(text=text, keys=keys, value=_value(raw.lstrip(), annotation_at(model, table, keys)))


def key_of(setting: str) -> str:
    """The `section.key` of `section.key=value`."""
    return setting.partition("=")[0].strip()


def _check_entry(text: str, kind: str, keys: tuple[str, ...], table: Table) -> None:
    if len(keys) < 2:
        raise ConfigError(f"override {text!r}: each {kind} is addressed as {kind}.NAME.key=value")
    if named(table.get(kind), keys[0]) is None:
        known = [entry["name"] for entry in table.get(kind, [])]
        close = difflib.get_close_matches(keys[0], known, n=1)
        none = f"none; write a [[{kind}]] of that name into a recipe"
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or none}"
        raise ConfigError(f"override {text!r}: the recipe has no {kind} {keys[0]!r}; {hint}")


def _value(raw: str, annotation: Any) -> Any:
    """`raw` as TOML, else as text; a key that holds text takes `5` as the text "5"."""
    if raw.strip() == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    value = parsed["value"]
    takes_text = str in (annotation, *typing.get_args(annotation)) and typing.get_origin(annotation) is not list
    return raw if len(parsed) > 1 or (takes_text and not isinstance(value, str)) else value


def recipes_folder() -> Path:
    """The recipes that come with rocstar: in a checkout its `recipes/`, in an installed package a copy of it. Raises
    ConfigError where they were not installed."""
    package = Path(rocstar.__file__).parent
    for folder in (package.parent / "recipes", package / "recipe_files"):
        if (folder / "quickstart.toml").is_file():
            return folder
    raise ConfigError(f"no recipes were installed with rocstar in {package}; take them from a checkout")
