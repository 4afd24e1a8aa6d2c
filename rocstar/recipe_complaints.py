"""Says in one sentence what is wrong with a recipe and where: file and line or the override, the key, the nearest key.

Not here: reading and merging recipes (`recipe.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rocstar.config import STAGES, Recipe, RlStage, Section

Table = dict[str, Any]
Keys = tuple[str, ...]

HEADER = re.compile(r"\s*(\[\[?)\s*([^\]#]+?)\s*\]")
ASSIGNMENT = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
MENTIONED_KEY = re.compile(r"\b[a-z_]+\.[a-z_]+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One file of an `extends` chain."""

    path: Path
    text: str
    """The file as it is, for finding lines."""
    base: Table
    """Its sections, `extends` and `stage` taken out."""
    stages: tuple[Table, ...]
    """Its `[[stage]]` entries, each with a name."""

    def line_of(self, stage: str | None, keys: Keys) -> int | None:
        """Line of a key of a stage (None: of the base), or of the table it stands in; None when it is not here."""
        if stage is None:
            return find_line(self.text, None, keys) if keys and _holds(self.base, keys) else None
        for number, table in enumerate(self.stages):
            if table["name"] == stage and _holds(table, keys):
                return find_line(self.text, number, keys)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One `key=value` of the command line."""

    text: str
    """As it was typed."""
    stage: str | None
    """The one stage it is meant for; None for the base and every stage."""
    keys: Keys
    value: Any


def complaint(
    error: ValidationError, layers: Sequence[Layer], changes: Sequence[Override], stages: Sequence[str]
) -> str:
    """One sentence about the first thing wrong. `stages` are the names of the resolved stages, in order."""
    # An unknown key comes first: `stepz` also makes `steps` missing, and only the former says what to change.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = first["loc"]
    stage: str | None = None
    model: type[Section] = Recipe
    if place[:1] == ("stage",) and len(place) > 1 and isinstance(place[1], int):
        # The third part names the member of the union that was chosen by `kind`; without one there is no more to say.
        stage, model, place = stages[place[1]], STAGES.get(str(place[2:3] and place[2]), RlStage), place[3:]
    keys = tuple(part for part in place if isinstance(part, str))
    what = _what(first, ".".join(keys if stage is None else ("stage", stage, *keys)), keys, model)
    blamed = [keys] if keys else [tuple(key.split(".")) for key in MENTIONED_KEY.findall(what)]
    return f"{_where(stage, blamed, layers, changes)}: {what}"


def _what(fault: ErrorDetails, name: str, keys: Keys, model: type[Section]) -> str:
    kind, message, value = fault["type"], fault["msg"], fault["input"]
    if kind == "extra_forbidden":
        return f"unknown key {name}; {_key_hint(keys, model)}"
    if kind == "union_tag_not_found":
        return f"{name}.kind is missing; set it to 'sft' or 'rl'"
    if kind == "union_tag_invalid":
        return f"{name}.kind = {value.get('kind')!r} should be 'sft' or 'rl'"
    if kind == "missing":
        return f"{name} is missing; give it a value"
    if kind == "value_error":
        return f"{name}: {message.removeprefix('Value error, ')}"
    wanted = message.removeprefix("Input should be ")
    options = re.findall(r"'([^']*)'", wanted) if kind == "literal_error" else []
    close = difflib.get_close_matches(str(value), options, n=1)
    return f"{name} = {value!r} should be {wanted}" + (f"; did you mean {close[0]!r}?" if close else "")


def _key_hint(keys: Keys, model: type[Section]) -> str:
    """The same key in another section, else a neighbour of nearly that name, else any key of nearly that name."""
    given, last = ".".join(keys), keys[-1]
    kinds = [kind for kind, other in STAGES.items() if other is not model and keys in _all_keys(other)]
    if model is not Recipe and kinds:
        return f"{given} belongs to stages of kind {kinds[0]!r}"
    if model is not Recipe and keys in _all_keys(Recipe):
        return f"{given} holds for the whole run; set it in [{keys[0]}]"
    every = {".".join(path): path for path in _all_keys(model)}
    namesakes = difflib.get_close_matches(given, [name for name, path in every.items() if path[-1] == last], 1, 0.0)
    if namesakes:
        return f"did you mean {namesakes[0]}?"
    neighbours = {path[-1]: name for name, path in every.items() if path[:-1] == keys[:-1]}
    for candidates in (neighbours, {path[-1]: name for name, path in every.items()}):
        if close := difflib.get_close_matches(last, candidates, 1):
            return f"did you mean {candidates[close[0]]}?"
    return f"the keys there are {', '.join(neighbours)}"


def _all_keys(model: type[Section]) -> Iterator[Keys]:
    for name, field in model.model_fields.items():
        yield (name,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from ((name, *rest) for rest in _all_keys(field.annotation))


def _where(stage: str | None, blamed: Sequence[Keys], layers: Sequence[Layer], changes: Sequence[Override]) -> str:
    """The override, or the file and line, that last set one of the blamed keys of a stage (None: of the base)."""
    for keys in blamed:
        for change in reversed(changes):
            if change.stage in (None, stage) and all(a == b for a, b in zip(keys, change.keys, strict=False)):
                return f"override {change.text!r}"
    for keys in (*blamed, ()):
        for scope in (stage, None):
            for layer in reversed(layers):
                if line := layer.line_of(scope, keys):
                    return f"{layer.path} line {line}"
    return str(layers[-1].path)


def _holds(table: Any, keys: Keys) -> bool:
    return not keys or (isinstance(table, dict) and keys[0] in table and _holds(table[keys[0]], keys[1:]))


def find_line(text: str, stage: int | None, keys: Keys) -> int | None:
    """1-based line that writes `keys`, or else the innermost table around them, in the `stage`-th [[stage]] (None: in
    the base sections). TOML readers keep no positions, so the text is scanned: headers and `key =` lines are enough."""
    best, depth, seen, scope, table = None, -1, -1, None, Keys()
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            table = _names(header[2])
            if table[0] == "stage":
                seen += header[1] == "[[" and len(table) == 1
                scope, table = seen, table[1:]
            else:
                scope = None
            written = table
        elif assignment := ASSIGNMENT.match(line):
            written = (*table, *_names(assignment[1]))
        else:
            continue
        if scope == stage and depth < len(written) <= len(keys) and keys[: len(written)] == written:
            best, depth = number, len(written)
    return best


def _names(dotted: str) -> Keys:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
