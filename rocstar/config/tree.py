"""Addresses of settings, in TOML tables and in the pydantic models that give them types. Pure functions.

An address is the keys from the top; an entry of a list of tables is addressed by its name. With `[[stage]]`,
`name = "warm"`, `steps = 5`, the 5 stands at ("stage", "warm", "steps").
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

Table = dict[str, Any]
Keys = tuple[str, ...]
Model = type[BaseModel]


# Tables


def flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted names; a list of tables that have names counts as a table of those."""
    for key, inner in value.items():
        if isinstance(inner, list) and inner and all(isinstance(one, Mapping) and "name" in one for one in inner):
            inner = {one["name"]: one for one in inner}
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{before}{key}.")
        else:
            yield f"{before}{key}", inner


def merged(old: Any, new: Any) -> Any:
    """Tables merge key by key, lists of named tables entry by entry; anything else is replaced, or by an empty list."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    if new and _are_named(old) and _are_named(new):
        changes = {entry["name"]: entry for entry in new}
        return [merged(entry, changes.pop(entry["name"], {})) for entry in old] + list(changes.values())
    return new


def put(table: Table, keys: Keys, value: Any) -> Table:
    """A table with `value` merged in at an address; tables on the way are created, entries of lists must exist."""
    head, *rest = keys
    inner = table.get(head)
    if not rest:
        return {**table, head: merged(inner, value)}
    if _are_named(inner):
        name, below = rest[0], tuple(rest[1:])
        return {**table, head: [put(entry, below, value) if entry["name"] == name else entry for entry in inner]}
    return {**table, head: put(inner if isinstance(inner, dict) else {}, tuple(rest), value)}


def holds(table: Any, keys: Keys) -> bool:
    """Whether there is a value at an address."""
    if not keys:
        return True
    inner = table.get(keys[0]) if isinstance(table, dict) else named(table, keys[0])
    return inner is not None and holds(inner, keys[1:])


def named(entries: Any, name: str) -> Table | None:
    """The entry of a list of tables that has this name."""
    listed = entries if isinstance(entries, list) else []
    return next((entry for entry in listed if isinstance(entry, dict) and entry.get("name") == name), None)


def _are_named(entries: Any) -> typing.TypeGuard[list[Table]]:
    return isinstance(entries, list) and all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries)


# Models


def members(annotation: Any) -> list[Model]:
    """The models that an annotation may hold, through lists, unions and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in members(part)]


def lists_tables(annotation: Any) -> bool:
    """Whether it is written as `[[...]]`."""
    return typing.get_origin(annotation) is list and bool(members(annotation))


def chosen(annotation: Any, value: Any) -> Model | None:
    """The model that gives `value` its type: the only one, or of several the one whose tag `value` carries."""
    options = members(annotation)
    if len(options) == 1:
        return options[0]
    return next((model for model in options if isinstance(value, dict) and _carries_tag(model, value)), None)


def _carries_tag(model: Model, value: Table) -> bool:
    required = {name: field.annotation for name, field in model.model_fields.items() if field.is_required()}
    tags = {name: of for name, of in required.items() if typing.get_origin(of) is Literal}
    return all(value.get(name) in typing.get_args(of) for name, of in tags.items())


def annotation_at(model: Model, table: Table, keys: Keys) -> Any:
    """The type of the value at an address; None if there is no such key. `table` decides between models."""
    annotation: Any = model
    value: Any = table
    for key in keys:
        if lists_tables(annotation):
            (annotation,), value = typing.get_args(annotation), named(value, key)
            continue
        found = chosen(annotation, value)
        field = found.model_fields.get(key) if found else None
        if field is None:
            return None
        annotation, value = field.annotation, value.get(key) if isinstance(value, dict) else None
    return annotation


def all_keys(model: Model) -> Iterator[Keys]:
    """Every address below a model, lists of tables left out."""
    for name, field in model.model_fields.items():
        yield (name,)
        if not lists_tables(field.annotation):
            for inner in members(field.annotation):
                yield from ((name, *rest) for rest in all_keys(inner))


def with_lists(annotation: Any, value: Any) -> Any:
    """`value` with a single text replaced by a list of one wherever a list is expected."""
    if typing.get_origin(annotation) is list:
        items = [value] if isinstance(value, str) else value
        (of,) = typing.get_args(annotation)
        return [with_lists(of, item) for item in items] if isinstance(items, list) else items
    model = chosen(annotation, value)
    if model is None or not isinstance(value, dict):
        return value
    fields = model.model_fields
    return {key: with_lists(fields[key].annotation, v) if key in fields else v for key, v in value.items()}
