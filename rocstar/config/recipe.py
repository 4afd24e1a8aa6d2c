"""Reads a training recipe: what `layers.py` does for every recipe, and stages on top of it.

Not here: what the keys mean (`sections.py`) and what is done with them (`train.py`). The rules of stages:

- A stage starts from the base sections, as far as it may carry them (`sections.py`), and overrides them key by key. So
  a stage's own key, even a parent's, beats a child's base section; only the command line reaches into every stage.
- `section.key=value` changes the base and every stage that has the key, `stage.NAME.key=value` one stage.
- `run.modules` left empty becomes the folders of the recipe and of those it extends: a resumed run finds them again.
- A run keeps paths as absolute ones, so it may be resumed from another folder; complaints show them as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from rocstar.config.layers import key_of, merge_layers, parse_override, read_layers, read_text, validated
from rocstar.config.sections import Recipe
from rocstar.config.tree import Keys, Table, annotation_at, chosen, flat, merged, named, put, with_lists
from rocstar.config.unread import refuse_unread, unread
from rocstar.errors import ConfigError

STAGES = Recipe.model_fields["stage"].annotation


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe. Raises ConfigError, which names file and line (or the override) and the nearest key."""
    layers = read_layers(Path(path), Recipe)
    table = merge_layers(layers)
    changes = [parse_override(text, Recipe, table) for text in overrides]
    for change in changes:
        for keys in (change.keys, *_same_in_stages(change.keys, table)):
            table = put(table, keys, change.value)
    stages = [_completed(stage, table) for stage in table.get("stage", [])]
    recipe = validated(Recipe, {**table, "stage": stages}, layers, changes)
    refuse_unread(unread(recipe), layers, changes)
    beside = list(dict.fromkeys(str(layer.path.resolve().parent) for layer in reversed(layers)))
    if absent := [folder for folder in recipe.run.modules if not Path(folder).is_dir()]:
        raise ConfigError(f"run.modules names {absent[0]!r}, which is not a folder; correct the path or leave it out")
    run = recipe.run.model_copy(update={"modules": recipe.run.modules or beside})
    recipe = recipe.model_copy(update={"run": run})
    _refuse_unwritable(recipe.resolved())
    return recipe


def recipe_of(base: Table, stages: Sequence[Table]) -> Recipe:
    """A recipe from base sections and stages as plain tables; stages are filled up from the base. Raises
    ValidationError."""
    listed = [_completed(stage, base) for stage in stages]
    return Recipe.model_validate(with_lists(Recipe, {**base, "stage": listed}), strict=True)


def changed(recipe: Recipe, settings: Sequence[str], options: Mapping[str, str]) -> Recipe:
    """A recipe with other base settings, if stages do not have them, and other settings of single stages. `settings`
    are `section.key=value`, of which `stage.NAME.kind=KIND` adds a stage if there is none of that name; `options` maps
    such a text to the command-line option that set it. Raises ConfigError."""
    table = _with_added_stages(recipe.model_dump(), settings)
    given = [parse_override(text, Recipe, table) for text in settings]
    from_options = [replace(parse_override(text, Recipe, table), text=words) for text, words in options.items()]
    for change in (*given, *from_options):
        table = put(table, change.keys, change.value)
    result = validated(Recipe, table, (), (*given, *from_options))
    refuse_unread(unread(result), (), (*given, *from_options))
    _refuse_unwritable(result.resolved())
    return result


def refuse_others(
    settings: Iterable[str], read: tuple[str, ...], where: str, instead: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError for a setting of a key that begins with none of `read`. where: who reads these. instead: what
    to give in place of some keys, which are refused too."""
    for key in map(key_of, settings):
        if instead and key in instead:
            raise ConfigError(f"{key} is not read here; use {instead[key]}")
        if not key.startswith(read):
            raise ConfigError(f"{key} is not read here; {where} reads {', '.join(read)}")


def _refuse_unwritable(settings: Table) -> None:
    """Raises ConfigError for a text, such as the path of a folder, with bytes that are not UTF-8, because the run's
    settings could not be read back, or with a NUL, which no path or command can hold."""
    for key, value in flat(settings):
        text = json.dumps(value, ensure_ascii=False)
        fault = "is not UTF-8 text" if re.search("[\ud800-\udfff]", text) else None
        if r"\u0000" in text.replace(r"\\", ""):  # a backslash itself is written as two
            fault = "holds a NUL character"
        if fault:
            raise ConfigError(f"{key} = {value!r:.200} {fault}; rename what it names, or write it anew")


def _with_added_stages(table: Table, settings: Sequence[str]) -> Table:
    """The table with stages that are new, at the end, from the base sections."""
    for text in settings:
        keys, _, kind = (part.strip() for part in text.partition("="))
        if (found := re.fullmatch(r"stage\.([^.]+)\.kind", keys)) and named(table["stage"], found[1]) is None:
            added = _completed({"name": found[1], "kind": kind.strip("\"'")}, table)
            table = {**table, "stage": [*table["stage"], added]}
    return table


GONE = (
    ("rollout", "carry_over", 0.0),
    ("learning", "covariance_share", 2e-4),
    ("learning", "covariance_low", 1.0),
    ("learning", "covariance_high", 5.0),
    ("learning", "covariance_kl", 1.0),
    ("learning", "turn_discount", 0.9),
)
"""Section, key and default of settings that there are no longer: runs begun earlier name them, and go on if they did
not use them."""


def resolved_from_json(path: str | Path) -> Recipe:
    """Read `config.resolved.json` back. Raises ConfigError when it is missing or was not written by this version."""
    try:
        return Recipe.model_validate_json(_as_it_began(Path(path).read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); only a run folder can be resumed") from None
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"holds no settings ({first['msg']}); put it back from a copy"
        if key := ".".join(map(str, first["loc"])):
            reason = (
                f"does not fit this version of rocstar: {key}: {first['msg']}; go on with the one that run.json names"
            )
        raise ConfigError(f"{path} {reason}") from None


def _as_it_began(settings: bytes) -> bytes:
    """Settings of a run of an earlier version as this one has them, where they mean the same."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        values = json.loads(settings)
        for part in (values, *values["stage"]):
            for section, key, unused in GONE:
                if part.get(section, {}).get(key) == unused:
                    del part[section][key]
        for stage in values["stage"]:
            if stage.get("rollout", {}).get("max_staleness_steps") and stage["learning"]["importance_cap"] is None:
                stage["learning"]["importance_cap"] = 0.0  # it had no default
        return json.dumps(values).encode()
    return settings


def recipe_text(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The recipe file as written, with a comment on top that names its origin and the overrides."""
    changes = "".join(f"# override: {text!r}\n" for text in overrides)
    return f"# copy of {path}; the settings in force are in config.resolved.json\n{changes}\n{read_text(Path(path))}"


def _completed(stage: Table, base: Table) -> Table:
    """The stage, its sections filled up from the base with those keys that a stage may change."""
    model = chosen(STAGES, stage)  # none for an unknown kind, which validation reports
    sections = {n: s for n, f in model.model_fields.items() if (s := chosen(f.annotation, None))} if model else {}
    filled = dict(stage)
    for name, section in sections.items():
        given = base.get(name)
        own = given if isinstance(given, dict) else {}
        filled[name] = merged({k: v for k, v in own.items() if k in section.model_fields}, stage.get(name, {}))
    return filled


def _same_in_stages(keys: Keys, table: Table) -> list[Keys]:
    """The addresses of a base key in the stages that have it too."""
    addresses = [("stage", stage["name"], *keys) for stage in table.get("stage", [])]
    return [address for address in addresses if len(keys) > 1 and annotation_at(Recipe, table, address) is not None]
