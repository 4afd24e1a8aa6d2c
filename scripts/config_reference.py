"""Writes docs/config.md, the reference of every key of a recipe, from the typed tree (config/sections.py, places.py).

`python scripts/config_reference.py` after a change there (`--print` prints it instead); a test compares. A row takes
its sentence from the string under the field, its type and range from the annotation, its unit from the last word of its
name, and the section of the paper that gives its default from the comment beside it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rocstar.config.sections import STAGES, Recipe
from rocstar.config.tree import lists_tables, members
from rocstar.config.values import Section

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
UNITS = ("seconds", "bytes", "tokens", "chars", "steps", "rows", "attempts", "problems", "turns", "calls", "updates")
UNSET = "unset"
TYPES = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
OPENING = """\
# Every key of a recipe

Written by `python scripts/config_reference.py` from [rocstar/config/sections.py](../rocstar/config/sections.py) and
[rocstar/config/places.py](../rocstar/config/places.py); edit those files instead.
How recipes are read, extended and overridden: [recipes.md](recipes.md).

Defaults are for a pretrained model. (§) is the section of the paper (arXiv 2508.20722) that gives a default. "Stage"
names the kinds of `[[stage]]` that may set the key for themselves. A name that ends in a unit (`timeout_seconds`) is
measured in it. On the command line `none` unsets a key.
"""


def reference() -> str:
    """The page."""
    sections = [part for name, field in Recipe.model_fields.items() for part in _sections(name, field)]
    return "\n\n".join([OPENING.rstrip(), *sections]) + "\n"


def _sections(name: str, field: FieldInfo) -> list[str]:
    """A section and the lists of tables in it."""
    listed = lists_tables(field.annotation)
    parts = []
    for model in members(field.annotation):
        head = f"[[{name}]]" if listed else f"[{name}]"
        kind = _kind(model)
        parts.append(_section(f"{head}, kind {kind}" if kind else head, model, name))
        for key, inner in model.model_fields.items():
            if lists_tables(inner.annotation):
                parts += _sections(f"{name}.{key}", inner)
    return parts


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return f"`{typing.get_args(field.annotation)[0]}`" if field else None


def _section(head: str, model: type[BaseModel], name: str) -> str:
    rows = [row for key, field in model.model_fields.items() if (row := _row(key, field, model, name))]
    about = inspect.cleandoc(model.__dict__.get("__doc__") or "")
    lines = [f"## {head}", ""]
    if about:
        lines += [_joined(about), ""]
    staged = any(_stages_with(name, key) for key in model.model_fields)
    columns = ["key", "value", "default", *(["stage"] if staged else []), "what it does"]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for key, value, default, what in rows:
        stages = [", ".join(_stages_with(name, key))] if staged else []
        lines.append("| " + " | ".join([f"`{key}`", value, default, *stages, what]) + " |")
    return "\n".join(lines)


def _row(key: str, field: FieldInfo, model: type[BaseModel], name: str) -> tuple[str, str, str, str] | None:
    if lists_tables(field.annotation):
        return key, f"tables, `[[{name}.{key}]]` below", "none", _sentence(model, key)
    inner = members(field.annotation)
    if inner and name == "stage":
        return key, f"section `[stage.{key}]`", f"that of `[{key}]`", f"Keys of [{key}] marked with this kind of stage."
    if inner:
        nested = [f"`{sub}`" for sub in inner[0].model_fields]
        return key, f"table of {' and '.join(nested)}", _default(inner[0]()), _sentence(model, key)
    source = _source(model, key)
    default = "to be given" if field.is_required() else _default(field.default) + (f" ({source})" if source else "")
    return key, _value(key, field), default, _sentence(model, key)


def _value(key: str, field: FieldInfo) -> str:
    """Type, unit and range, in words."""
    kinds = [kind for kind in _kinds(field.annotation) if kind != UNSET]
    unset = [UNSET] if UNSET in _kinds(field.annotation) else []
    unit = next((word for word in reversed(key.split("_")) if word in UNITS), None)
    if unit and kinds[0] in (TYPES[int], TYPES[float]):
        kinds[0] = unit
    limits = [f"{BOUNDS[type(m)][1]} {_number(getattr(m, BOUNDS[type(m)][0]))}" for m in _bounds(field)]
    share = "at least 0" in limits and "at most 1" in limits
    words = f"{kinds[0]}, 0 to 1" if share else ", ".join([kinds[0], *limits])
    return ", or ".join([words, *kinds[1:], *unset])


def _bounds(field: FieldInfo) -> list[Any]:
    found = list(field.metadata)
    for part in (field.annotation, *typing.get_args(field.annotation)):
        for note in getattr(part, "__metadata__", ()):
            found += getattr(note, "metadata", [note])
    return [note for note in found if type(note) in BOUNDS]


def _kinds(annotation: Any) -> list[str]:
    """The words for each member of a union."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [word for part in inside for word in _kinds(part)]
    if origin is typing.Annotated:
        return _kinds(inside[0])
    if origin is Literal:
        return [", ".join(f"`{choice}`" for choice in inside)]
    if origin is list:
        return [f"list of {' or '.join(_kinds(inside[0]))}"]
    if annotation is type(None):
        return [UNSET]
    return [TYPES.get(annotation, "table")]


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        return ", ".join(f"`{key} = {json.dumps(inner)}`" for key, inner in value.model_dump().items())
    if value is None:
        return UNSET
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else f"{value:,}"


def _stages_with(section: str, key: str) -> list[str]:
    """The kinds of stage that may set a key for themselves."""
    fields = {kind: model.model_fields.get(section) for kind, model in STAGES.items()}
    return [kind for kind, field in fields.items() if field and key in field.annotation.model_fields]  # type: ignore[union-attr]


# What the source says beside a field


@cache
def _fields(model: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """Sentence and paper section by field, of the class itself."""
    source = textwrap.dedent(inspect.getsource(model))
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            comment = re.search(r"#.*?(§[\d.]+)", source.splitlines()[node.end_lineno - 1])  # type: ignore[operator]
            found[node.target.id] = (_joined(inspect.cleandoc(said)), comment[1] if comment else "")
    return found


def _beside(model: type[BaseModel], key: str) -> tuple[str, str]:
    owners = [base for base in model.__mro__ if issubclass(base, Section) and key in _fields(base)]
    return _fields(owners[0])[key]


def _sentence(model: type[BaseModel], key: str) -> str:
    said = _beside(model, key)[0]
    if not said:
        raise ValueError(f"{model.__name__}.{key} has no sentence in rocstar/config/sections.py; write one under it")
    return said.replace("|", "\\|")


def _source(model: type[BaseModel], key: str) -> str:
    return _beside(model, key)[1]


def _joined(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(reference())
    else:
        PAGE.write_text(reference())
