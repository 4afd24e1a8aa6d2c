"""Reads a pool's TOML file and the overrides of the command line into `PoolConfig`. One file, no inheritance.

An unknown key is refused with its line and the nearest key that exists.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rocstar.data.pool.config import PoolConfig
from rocstar.errors import ConfigError

Table = dict[str, Any]


def load_pool_config(path: str | Path, overrides: Sequence[str] = ()) -> PoolConfig:
    """Raises ConfigError, which names file and line, or the override, and the nearest key. Source: ours."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no pool recipe {path}; try recipes/data/math_pool.toml") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(table, override)
    try:
        return PoolConfig.model_validate(table)
    except ValidationError as error:
        # An unknown key comes first: `pth` also makes `path` missing, and only the former says what to change.
        fault = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(_complaint(fault, path, text, overrides)) from None


def nearest(name: str, known: Sequence[str]) -> str:
    """`did you mean x?`, or all names where none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _apply(table: Table, override: str) -> None:
    name, equals, raw = (part.strip() for part in override.partition("="))
    keys = name.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key=value or section.key=value")
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {key} is a list in the recipe; change it there")
        table = inner
    table[keys[-1]] = _value(raw)


def _value(raw: str) -> Any:
    """TOML, else plain text; `none` unsets."""
    if raw == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return raw if len(parsed) > 1 else parsed["value"]


def _complaint(fault: ErrorDetails, path: str | Path, text: str, overrides: Sequence[str]) -> str:
    place = fault["loc"]
    name = ".".join(f"{part + 1}" if isinstance(part, int) else part for part in place)
    key = next(part for part in reversed(place) if isinstance(part, str))
    typed = next((given for given in overrides if given.partition("=")[0].strip() == name), None)
    where = f"override {typed!r}" if typed else f"{path}{_line(text, key)}"
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown key {name}; {nearest(key, _keys_at(place[:-1]))}"
    if fault["type"] == "missing":
        return f"{where}: {name} is missing; give it a value"
    return f"{where}: {name} = {fault['input']!r}: {fault['msg'].lower()}"


def _line(text: str, key: str) -> str:
    found = re.search(rf"^\s*(?:\[+\s*)?{re.escape(key)}\s*[\]=.]", text, re.MULTILINE)
    return f" line {text.count(chr(10), 0, found.end()) + 1}" if found else ""


def _keys_at(place: Sequence[int | str]) -> list[str]:
    """Keys of the section that a location leads to."""
    model: type[BaseModel] = PoolConfig
    for part in place:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            inner = typing.get_args(annotation)
            model = typing.cast(type[BaseModel], inner[0] if inner else annotation)
    return list(model.model_fields)
