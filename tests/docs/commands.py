"""Checks a command line of a page without carrying it out: verbs, flags, files, and keys of the recipe."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter

from rocstar.analysis.sweep import values_of
from rocstar.cli.main import USAGE_ERROR, click_command
from rocstar.config.layers import parse_override
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import Recipe
from rocstar.config.tree import annotation_at
from tests.docs.pages import ROOT

OPERATORS = {"&&", "||", "|", ";", ">", "<", "&"}
OURS = ("recipes/", "examples/", "benchmarks/", "constraints/", "scripts/", "docs/")
SETTING = re.compile(rf"({'|'.join(Recipe.model_fields)})\.[\w.]+=.+", re.DOTALL)
CLICK: Any = click_command()


def rocstar_calls(command: str) -> list[list[str]]:
    """The arguments of each `rocstar ...` in a shell line."""
    calls: list[list[str]] = []
    reading = False
    for word in shlex.split(command):
        if word in OPERATORS:
            reading = False
        elif not reading and Path(word).name == "rocstar":
            reading = True
            calls.append([])
        elif reading:
            calls[-1].append(word)
    return calls


def check(command: str, page: Path) -> None:
    """Raises typer's usage errors, ConfigError, or ValueError (of pydantic too)."""
    for arguments in rocstar_calls(command):
        parse(arguments)
        check_settings(arguments)
    if wrong := [*absent_files(command, page), *unknown_flags(command), *unknown_extras(command)]:
        raise ValueError(f"{command!r}: there is no {', '.join(wrong)}")


def parse(arguments: list[str]) -> None:
    """As the command line does. Raises typer's usage errors."""
    group, name, rest = CLICK, "rocstar", arguments
    while True:
        context = group.make_context(name, list(rest), resilient_parsing=False)
        if not hasattr(group, "resolve_command"):
            return
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])


def parse_in_part(arguments: list[str]) -> None:
    """The same for a command that a sentence names, which may lack arguments or have N for a number."""
    lacks = ("MissingParameter", "NoArgsIsHelpError", *(["BadParameter"] if any(map(str.isupper, arguments)) else []))
    try:
        parse(arguments)
    except typer.Exit:  # of --help
        return
    except USAGE_ERROR as error:
        if type(error).__name__ not in lacks:
            raise


def check_settings(arguments: list[str]) -> None:
    """Every `section.key=value` is a key, and a value that fits it. Raises ConfigError or ValueError."""
    given = [word for word in arguments if SETTING.fullmatch(word)]
    values = [values_of(setting) if arguments[0] == "sweep" else [setting] for setting in given]
    recipe = next((ROOT / word for word in arguments if word.startswith("recipes/")), None)
    if recipe is not None and "--resume" not in arguments and arguments[0] != "data":
        load_recipe(recipe, [several[0] for several in values])
    for setting in (value for several in values for value in several):
        check_setting(setting)


def check_setting(setting: str) -> None:
    """Of any recipe, whatever its stages and engines are called. A value in capitals stands for the reader's."""
    key, _, value = setting.partition("=")
    keys = key.split(".")
    named = keys[1] if keys[0] in ("stage", "engine") else ""
    kinds = [{keys[0]: [{"name": named, "kind": kind}]} for kind in ("rl", "sft", "torch", "vllm")] if named else [{}]
    if keys[:2] == ["data", "options"] or keys[-1] == "key":  # of a Task of the reader's own; any key
        return
    fits = [table for table in kinds if annotation_at(Recipe, table, tuple(keys)) is not None]
    if not fits:
        raise ValueError(f"{setting!r}: a recipe has no key {key}")
    if not value.strip().isupper():
        given = parse_override(setting, Recipe, fits[0])
        of_a_list = given.value if not isinstance(given.value, str) else [given.value]
        annotation = annotation_at(Recipe, fits[0], tuple(keys))
        TypeAdapter(annotation).validate_python(of_a_list if "list" in str(annotation) else given.value)


def absent_files(command: str, page: Path) -> list[str]:
    """Files of this repository that a command names and that are not there."""
    named = [word for word in re.findall(r"[\w./-]+", command) if word.startswith(OURS)]
    return [word for word in named if not (ROOT / word).exists() and not (page.parent / word).exists()]


def unknown_flags(command: str) -> list[str]:
    """Flags given to a script of this repository that its source does not name."""
    found = re.search(r"python3? ((?:benchmarks|examples)/[\w/]+\.py)(.*)", command)
    if found is None:
        return []
    source = (ROOT / found[1]).read_text()
    return [flag for flag in re.findall(r"(?<= )--[a-z][a-z0-9-]*", found[2]) if f'"{flag}"' not in source]


def unknown_extras(command: str) -> list[str]:
    """Extras of rocstar that pyproject.toml does not have."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for names in re.findall(r"(?:rocstar|\.)\[([\w,]+)\]", command) for name in names.split(",")]
    return [name for name in named if name not in extras]
