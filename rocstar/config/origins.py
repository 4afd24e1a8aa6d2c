"""Finds the settings of a recipe that are not the defaults, and the origin of each, for `--dry-run`.

A stage's own value is shown where it differs from the run's. Not here: how a recipe is read (`recipe.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rocstar.config.complaint import Layer, Override
from rocstar.config.layers import merge_layers, parse_override
from rocstar.config.sections import Recipe
from rocstar.config.tree import flat, holds

READ = ("ROCSTAR_VLLM_PYTHON", "ROCSTAR_SANDBOX_TOKEN", "ROCSTAR_THREADS", "RAY_ADDRESS", "HF_HOME", "HF_HUB_OFFLINE")
"""Environment variables that a run reads."""
SECRET = "TOKEN"
ABSENT = "no default"


Provenance = dict[str, Any]
"""A setting that is not its default: `key` as the command line takes it, `value`, `default` (for a stage's own key the
run's value, ABSENT if a recipe must set it), and `source`: file and line, command line, environment variable, or what
it was derived from."""


def provenances(
    recipe: Recipe, settings: Sequence[str], *, otherwise: str, layers: Sequence[Layer] = ()
) -> Iterator[Provenance]:
    """The settings of a recipe that are not their defaults. settings: those of the command line. layers: the recipe
    file and those that it extends; none for a run that goes on. otherwise: the origin of what neither gives."""
    table = merge_layers(layers) if layers else recipe.model_dump()
    changes = [parse_override(text, Recipe, table) for text in settings]
    values, defaults = dict(flat(recipe.resolved())), dict(flat(Recipe().resolved()))
    for key, value in values.items():
        base = key.split(".", 2)[2] if key.startswith("stage.") else key
        default = values.get(base, ABSENT) if base != key else defaults.get(key, ABSENT)
        counted = key.endswith(".epochs") and value == 0  # the steps are shown, which epochs have come to
        listed = key.endswith(".name") and key != "run.name"  # of a stage or an engine, which the key has already
        unsaid = default is ABSENT and value in ([], None)
        if value != default and not counted and not listed and not unsaid:
            source = _source(key, layers, changes) or otherwise
            yield {"key": key, "value": value, "default": default, "source": source}


def _source(key: str, layers: Sequence[Layer], changes: Sequence[Override]) -> str | None:
    keys = tuple(key.split("."))
    for change in reversed(changes):
        # `stage.x.rollout.top_p` is given by itself, by a table above it, and by `rollout.top_p`.
        given = change.keys
        if keys[: len(given)] == given or (keys[0] == "stage" and keys[2:][: len(given)] == given):
            return f"command line: {change.text}"
    for layer in reversed(layers):
        if holds(layer.table, keys):
            return f"{layer.path}:{layer.line_of(keys)}"
    return None


def of_environment(environment: Mapping[str, str]) -> Iterator[Provenance]:
    """The variables that a run reads; secrets are not shown."""
    for name in READ:
        if value := environment.get(name):
            shown = "(set)" if SECRET in name else value
            yield {"key": name, "value": shown, "default": None, "source": "environment variable"}
