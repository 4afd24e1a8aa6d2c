"""Reads a recipe: a TOML file, the files it `extends` and the overrides of the command line become one typed tree.

Not here: what the keys mean (`config.py`) and what is done with them (`train.py`). The rules, all of them:

- `extends = "other.toml"` names a parent, relative to the file that says it; chains are fine, cycles are refused.
- Sections merge key by key, the child's value wins; a list replaces a list.
- A `[[stage]]` entry whose name a parent also has changes that stage key by key; any other is appended.
- A stage starts from the base sections and overrides them key by key, as far as its kind may (`config.py`). So a
  stage's own key, even a parent's, beats a child's base section; only the command line reaches into every stage.
- `section.key=value` changes the base and every stage, `stage.NAME.key=value` and `stage.NAME.section.key=value` one
  stage; they are applied last, in the order given. A value is TOML, else plain text; `none` unsets.
- A single text where a list is expected is a list of one.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rocstar.config import STAGES, Recipe, RlStage, Section
from rocstar.errors import ConfigError
from rocstar.recipe_complaints import Keys, Layer, Override, Table, complaint, find_line


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe. Raises ConfigError, which names file and line (or the override) and the nearest key."""
    layers = _read_chain(Path(path))
    base = reduce(_merged, (layer.base for layer in layers), Table())
    stages = reduce(_merged_stages, (layer.stages for layer in layers))
    changes = [_parse_override(text, stages) for text in overrides]
    for change in changes:
        base, stages = _apply(change, base, stages)
    try:
        return recipe_of(base, stages)
    except ValidationError as error:
        raise ConfigError(complaint(error, layers, changes, [stage["name"] for stage in stages])) from None


def recipe_of(base: Table, stages: Sequence[Table]) -> Recipe:
    """From base sections and stages as plain tables; stages are filled up from the base. Raises ValidationError."""
    listed = [_lists_made(STAGES.get(stage.get("kind", ""), Section), _completed(stage, base)) for stage in stages]
    return Recipe.model_validate({**_lists_made(Recipe, base), "stage": listed}, strict=True)


def dump_resolved(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain JSON values; nulls survive."""
    return recipe.model_dump(mode="json")


def resolved_from_json(path: str | Path) -> Recipe:
    """Read `config.resolved.json` back. Raises ConfigError when it is missing or was not written by this version."""
    try:
        return Recipe.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); only a run folder can be resumed") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} does not fit this version of rocstar: {key}: {first['msg']}") from None


def recipe_text(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The recipe file as written, with a comment on top that says where it came from and what was overridden."""
    changes = "".join(f"# override: {text!r}\n" for text in overrides)
    return f"# copy of {path}; the settings in force are in config.resolved.json\n{changes}\n{_read_text(Path(path))}"


# Reading files


def _read_chain(path: Path, children: tuple[Path, ...] = ()) -> list[Layer]:
    """Parents first, `path` last."""
    if path.resolve() in {child.resolve() for child in children}:
        chain = " -> ".join(str(link) for link in (*children, path))
        raise ConfigError(f"{chain}: these recipes extend each other in a circle; remove one `extends`")
    text = _read_text(path)
    table = _parse(path, text)
    parent = table.pop("extends", None)
    layer = Layer(path=path, text=text, stages=_stages_of(path, table), base=table)
    if parent is None:
        return [layer]
    line = find_line(text, None, ("extends",))
    if not isinstance(parent, str):
        raise ConfigError(f"{path} line {line}: extends takes one file name in quotes, got {parent!r}")
    if not (path.parent / parent).is_file():
        raise ConfigError(f"{path} line {line}: extends: {_not_found(path.parent / parent)}")
    return [*_read_chain(path.parent / parent, (*children, path)), layer]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_not_found(path)) from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _not_found(path: Path) -> str:
    folders = (path.parent, Path("recipes"))
    recipes = {file.name: str(file) for folder in reversed(folders) for file in sorted(folder.glob("*.toml"))}
    # A bare `quickstart` is meant as `quickstart.toml`.
    close = difflib.get_close_matches(path.name.removesuffix(".toml") + ".toml", recipes, n=1, cutoff=0.5)
    hint = f"did you mean {recipes[close[0]]}?" if close else "give the path of a TOML recipe"
    return f"there is no recipe {path}; {hint}"


def _parse(path: Path, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).partition(" (at ")
        line = re.match(r"line \d+", place)
        raise ConfigError(f"{path} {line.group() if line else 'at its end'}: not valid TOML: {reason}") from None


def _stages_of(path: Path, table: Table) -> tuple[Table, ...]:
    stages = table.pop("stage", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ConfigError(f"{path}: stages are written as [[stage]], with two brackets")
    names = [stage.get("name") for stage in stages]
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or names.index(name) != number - 1:
            fault = f"is called {name!r} like another" if isinstance(name, str) else "has no name"
            raise ConfigError(f"{path}: [[stage]] number {number} {fault}; give each stage a name of its own")
    return tuple(stages)


# Merging


def _merged(old: Any, new: Any) -> Any:
    """Tables merge key by key; anything else is replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _merged_stages(old: tuple[Table, ...], new: tuple[Table, ...]) -> tuple[Table, ...]:
    changes = {stage["name"]: stage for stage in new}
    kept = [_merged(stage, changes.pop(stage["name"], {})) for stage in old]
    return (*kept, *changes.values())


def _sections_of(stage: Table) -> dict[str, type[Section]]:
    """The sections that a stage of this kind may carry; none where the kind is unknown, which is told later."""
    kind = stage.get("kind")
    model = STAGES.get(kind) if isinstance(kind, str) else None
    fields = model.model_fields.items() if model else ()
    return {name: field.annotation for name, field in fields if _is_section(field.annotation)}


def _completed(stage: Table, base: Table) -> Table:
    """The stage with its sections filled up from the base: with those keys, and only those, that a stage may change."""
    filled = {
        name: _merged(_known(section, base.get(name)), stage.get(name, {}))
        for name, section in _sections_of(stage).items()
    }
    return {**stage, **filled}


def _known(section: type[Section], table: Any) -> Table:
    return (
        {key: value for key, value in table.items() if key in section.model_fields} if isinstance(table, dict) else {}
    )


def _parse_override(text: str, stages: Sequence[Table]) -> Override:
    name, equals, raw = (part.strip() for part in text.partition("="))
    keys = tuple(name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    if keys[0] != "stage":
        return Override(text=text, stage=None, keys=keys, value=_value(raw, _annotation(Recipe, keys)))
    if len(keys) < 3:
        raise ConfigError(f"override {text!r}: a stage is addressed as stage.NAME.key=value")
    kinds = {stage["name"]: stage.get("kind") for stage in stages}
    if keys[1] not in kinds:
        close = difflib.get_close_matches(keys[1], kinds, n=1)
        known = f"did you mean {close[0]}?" if close else f"its stages are {', '.join(kinds) or 'none'}"
        raise ConfigError(f"override {text!r}: the recipe has no stage {keys[1]!r}; {known}")
    model = STAGES.get(kinds[keys[1]] or "", RlStage)
    return Override(text=text, stage=keys[1], keys=keys[2:], value=_value(raw, _annotation(model, keys[2:])))


def _value(raw: str, annotation: Any) -> Any:
    """`raw` as TOML, else as text; a key that holds text takes `5` as the text "5"."""
    if raw == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    value = parsed["value"]
    takes_text = str in (annotation, *typing.get_args(annotation)) and typing.get_origin(annotation) is not list
    return raw if len(parsed) > 1 or (takes_text and not isinstance(value, str)) else value


def _apply(change: Override, base: Table, stages: tuple[Table, ...]) -> tuple[Table, tuple[Table, ...]]:
    table = reduce(lambda inner, key: {key: inner}, reversed(change.keys), change.value)
    if change.stage is not None:
        return base, tuple(_merged(stage, table) if stage["name"] == change.stage else stage for stage in stages)
    stages = tuple(_merged(stage, table) if _reaches(change.keys, stage) else stage for stage in stages)
    return _merged(base, table), stages


def _reaches(keys: Keys, stage: Table) -> bool:
    """Whether a stage has this key of the base as well."""
    section = _sections_of(stage).get(keys[0])
    return section is not None and len(keys) > 1 and keys[1] in section.model_fields


# Looking at the typed tree


def _is_section(annotation: Any) -> typing.TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _annotation(model: type[BaseModel], keys: Keys) -> Any:
    """The type of a key; None when there is no such key."""
    field = model.model_fields.get(keys[0])
    if field is None or len(keys) == 1:
        return field.annotation if field else None
    return _annotation(field.annotation, keys[1:]) if _is_section(field.annotation) else None


def _lists_made(annotation: Any, value: Any) -> Any:
    """`value` with a list of one wherever a list is expected and a text stands."""
    if typing.get_origin(annotation) is list:
        items = [value] if isinstance(value, str) else value
        (of,) = typing.get_args(annotation)
        return [_lists_made(of, item) for item in items] if isinstance(items, list) else items
    if _is_section(annotation) and isinstance(value, dict):
        fields = annotation.model_fields
        return {key: _lists_made(fields[key].annotation, v) if key in fields else v for key, v in value.items()}
    return value
