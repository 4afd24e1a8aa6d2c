"""Describes the first error of a recipe in one sentence: file and line or the override, the key, the nearest key.

Not here: reading and merging (`layers.py`).
"""

from __future__ import annotations

import difflib
import re
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rocstar.config.tree import Keys, Model, Table, all_keys, annotation_at, chosen, holds, lists_tables, members, named

HEADER = re.compile(r"\s*(\[\[?)\s*([^\]#]+?)\s*\]")
ASSIGNMENT = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
MENTIONED_KEY = re.compile(r"\b[a-z_]+\.[a-z_]+\b")
VALUE_CHARS = 80  # of a wrong value in a sentence
REMOVED = {
    "rollout.carry_over": "rollout.max_staleness_steps keeps engines full over the end of a step",
    "learning.turn_discount": "learning.advantage takes rloo, or a function of your own",
    "learning.covariance_[a-z]+": "learning.top_entropy_share, or a learning.loss of your own, learns from some tokens",
}
"""Keys that there are no longer, as patterns, and what takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One file of an `extends` chain."""

    path: Path
    text: str
    """The file as it is, for finding lines."""
    table: Table
    """Its values, without `extends`."""

    def line_of(self, keys: Keys) -> int | None:
        """Line of an address, or of the table it stands in; None when it is not here."""
        if not keys or not holds(self.table, keys):
            return None
        entries = self.table[keys[0]]
        if not isinstance(entries, list) or len(keys) == 1:
            return find_line(self.text, keys)
        number = [entry["name"] for entry in entries].index(keys[1])  # stands in place of the entry's name
        return find_line(self.text, (keys[0], number, *keys[2:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `key=value` of the command line."""

    text: str
    """The text as it was typed."""
    keys: Keys
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """The place of a fault."""

    entry: Keys
    """Address of the entry of a list of tables that it is in; empty outside of one."""
    keys: Keys
    """Keys from that entry, or from the top."""
    model: Model
    """The model of that entry, or of the whole."""

    @property
    def name(self) -> str:
        return ".".join((*self.entry, *self.keys))


def complaint(
    error: ValidationError, model: Model, table: Table, layers: Sequence[Layer], changes: Sequence[Override]
) -> str:
    """One sentence about the first thing wrong with `table`, which `layers` and then `changes` made."""
    # An unknown key comes first: `stepz` also makes `steps` missing, and only the former shows what to change.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place, first = _place(model, table, errors[0]["loc"]), errors[0]
    same = (e["msg"] for e in errors if _place(model, table, e["loc"]) == place)  # one for each type that it may have
    expected = " or ".join(message.removeprefix("Input should be ") for message in same)
    what = _what(first, expected, place, model, table)
    mentioned = [tuple(key.split(".")) for key in MENTIONED_KEY.findall(first["msg"])]
    blamed = [keys for keys in mentioned if keys[: len(place.keys)] == place.keys] or [place.keys]
    # What an entry does not say itself comes from the section of that name at the top.
    addresses = [address for keys in blamed for address in dict.fromkeys(((*place.entry, *keys), keys))]
    return f"{_where([*addresses, place.entry], layers, changes)}: {what}"


def _place(model: Model, table: Table, location: Sequence[int | str]) -> FaultPlace:
    """Translate pydantic's location, in which entries are numbers, and tags of unions look like keys."""
    if len(location) < 2 or not lists_tables(annotation_at(model, table, (str(location[0]),))):
        keys = _texts(location)
        above = annotation_at(model, table, keys[:-1])
        tagged = len(keys) > 1 and above is not None and not members(above)
        return FaultPlace(entry=(), keys=keys[:-1] if tagged else keys, model=model)
    kind, number, *rest = location
    entry = table[str(kind)][number]
    annotation = annotation_at(model, table, (str(kind),))
    keys = _texts(rest[1:] if len(members(annotation)) > 1 else rest)
    return FaultPlace(entry=(str(kind), str(entry["name"])), keys=keys, model=chosen(annotation, entry) or model)


def _texts(location: Sequence[int | str]) -> Keys:
    return tuple(part for part in location if isinstance(part, str))


def _what(fault: ErrorDetails, expected: str, place: FaultPlace, top: Model, table: Table) -> str:
    kind, message, value, name = fault["type"], fault["msg"], fault["input"], place.name
    if kind == "extra_forbidden":
        given = ".".join(place.keys)
        for gone in (instead for key, instead in REMOVED.items() if re.fullmatch(key, given)):
            return f"{name} was removed; {gone}"
        return f"unknown key {name}; {_elsewhere(place, top, table) or _nearest(place)}"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = f"{name}.{fault['ctx']['discriminator'].strip(chr(39))}"
        known = ", ".join(_tags(members(annotation_at(top, table, place.entry[:1]))))
        return f"{tag} is {'missing' if kind.endswith('found') else 'unknown'}; set it to one of {known}"
    if kind == "missing":
        entries = lists_tables(annotation_at(top, table, place.keys)) if not place.entry else False
        return f"{name} is missing; {f'add a [[{name}]]' if entries else 'give it a value'}"
    if kind == "value_error":
        return f"{name}: {message.removeprefix('Value error, ')}".removeprefix(": ")
    options = re.findall(r"'([^']*)'", expected) if kind == "literal_error" else []
    close = difflib.get_close_matches(str(value), options, n=1)
    shown = repr(value) if len(repr(value)) <= VALUE_CHARS else f"{repr(value)[:VALUE_CHARS]}..."
    return f"{name} = {shown} should be {expected}" + (f"; did you mean {close[0]!r}?" if close else "")


def _tags(models: Sequence[Model]) -> list[str]:
    """The values that choose among models."""
    required = [f.annotation for model in models for f in model.model_fields.values() if f.is_required()]
    return [repr(tag) for a in required if typing.get_origin(a) is typing.Literal for tag in typing.get_args(a)]


def _elsewhere(place: FaultPlace, top: Model, table: Table) -> str | None:
    """Where a misplaced key belongs: to entries of another kind, to the whole run, or, if it is the name of an entry,
    after the entry's kind."""
    if not place.entry:
        kinds = (kind for kind, field in top.model_fields.items() if lists_tables(field.annotation))
        kind = next((kind for kind in kinds if named(table.get(kind), place.keys[0])), None)
        return f"did you mean {kind}.{place.keys[0]}.KEY?" if kind and place.keys[0] not in top.model_fields else None
    given = ".".join(place.keys)
    kind, annotation = place.entry[0], annotation_at(top, table, place.entry[:1])
    others = [tag for model in members(annotation) if place.keys in set(all_keys(model)) for tag in _tags([model])]
    if others:
        return f"{given} belongs to a {kind} of another kind ({', '.join(others)})"
    return f"{given} holds for the whole run; set it in [{place.keys[0]}]" if place.keys in set(all_keys(top)) else None


def _nearest(place: FaultPlace) -> str:
    """Suggest the same key in another section, unless it is the end of a neighbour's (`sft.learning_rate`), else a
    neighbour of nearly that name or any other key of almost that name."""
    given, last = ".".join(place.keys), place.keys[-1]
    every = {".".join(path): path for path in all_keys(place.model)}
    namesakes = difflib.get_close_matches(given, [name for name, path in every.items() if path[-1] == last], 1, 0.0)
    neighbours = {path[-1]: name for name, path in every.items() if path[:-1] == place.keys[:-1]}
    if namesakes:
        longer = [name for key, name in neighbours.items() if key.endswith(f"_{last}")]
        return f"did you mean {' or '.join(longer) or namesakes[0]}?"
    for candidates, least in ((neighbours, 0.6), ({path[-1]: name for name, path in every.items()}, 0.8)):
        if close := difflib.get_close_matches(last, candidates, 1, least):
            return f"did you mean {candidates[close[0]]}?"
    return f"the keys there are {', '.join(neighbours)}; docs/moving.md says what those of TRL and verl are called here"


def _where(addresses: Sequence[Keys], layers: Sequence[Layer], changes: Sequence[Override]) -> str:
    """The override, or the file and line, that last set the first of the addresses that is set anywhere."""
    for keys in addresses:
        for change in reversed(changes):
            if keys and all(a == b for a, b in zip(keys, change.keys, strict=False)):
                return f"override {change.text!r}"
    for keys in addresses:
        for layer in reversed(layers):
            if line := layer.line_of(keys):
                return f"{layer.path} line {line}"
    return str(layers[-1].path) if layers else "the settings"


def find_line(text: str, keys: tuple[str | int, ...]) -> int | None:
    """1-based line that writes `keys` (entries of lists by number), or else the innermost table around them.
    TOML readers keep no positions, so the text is scanned: headers and `key =` lines are enough."""
    best, depth = None, 0
    for number, written in _written(text):
        if depth < len(written) <= len(keys) and keys[: len(written)] == written:
            best, depth = number, len(written)
    return best


def _written(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """(line, address) of every header and assignment."""
    seen: Counter[str] = Counter()
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            first, *rest = _names(header[2])
            seen[first] += header[1] == "[[" and not rest
            table = (first, seen[first] - 1, *rest) if seen[first] else (first, *rest)
            yield number, table
        elif assignment := ASSIGNMENT.match(line):
            yield number, (*table, *_names(assignment[1]))


def _names(dotted: str) -> Keys:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
