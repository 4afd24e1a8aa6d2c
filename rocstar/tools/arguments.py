"""Checks of the model's arguments to a tool, and results of calls that no sandbox ran."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any

from rocstar.errors import first_line
from rocstar.types import Status, ToolCall, ToolResult, utf8

MOST_REFERENCES = 10_000  # followed in a check: each may double what is left to do
UNCHECKED = (
    *("format", "pattern", "patternProperties", "uniqueItems", "$dynamicRef", "$recursiveRef"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
"""Left to the tool's server: for a text or a name of 40 characters, a list of 3,000 objects, or one object under a
schema of 20 levels some take forever."""


def bad_call(call: ToolCall, reason: str) -> ToolResult:
    """The call was not run. `reason`: one sentence for the model, which may quote lone surrogates that it wrote."""
    return ToolResult(call_id=call.id, status=Status.BAD_CALL, stderr=utf8(reason))


def ran_here(
    call: ToolCall, status: Status, text: str, *, asked: float, began: float, ended: float, most: int | None = None
) -> ToolResult:
    """The result of a call. text: its output if the status is OK, else the error. asked, began, ended: times of
    `time.monotonic`. most: bytes of text to keep; more output is an OUTPUT_LIMIT."""
    whole = text.encode(errors="replace")
    shown = whole[:most].decode(errors="ignore")
    stdout, stderr = (shown, "") if status is Status.OK else ("", shown)
    is_cut = most is not None and len(whole) > most
    return ToolResult(
        call_id=call.id,
        status=Status.OUTPUT_LIMIT if is_cut and status is Status.OK else status,
        stdout=stdout,
        stderr=stderr,
        run_seconds=ended - began,
        queue_seconds=began - asked,
        truncated_bytes=len(whole) - len(shown.encode()),
    )


def wrong_names(given: Collection[str], parameters: Mapping[str, Any]) -> str | None:
    """Describes a missing required argument, or one that the schema does not name; None if there is neither."""
    known = parameters["properties"]
    for name in parameters.get("required", ()):
        if name not in given:
            return f"argument '{name}' is missing"
    for name in given:
        if name not in known:
            return f"unknown argument '{name}'; this tool takes {', '.join(known) or 'no arguments'}"
    return None


def schema_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """The arguments to call with, or an error message. Null counts as an omitted optional argument. An argument that
    the schema does not name is refused, unless the schema allows others. What can't be checked here, the tool's server
    will check: the schema is its own."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    given = {name: value for name, value in arguments.items() if value is not None or name in schema["required"]}
    is_closed = schema.get("additionalProperties", False) is False and "patternProperties" not in schema
    if is_closed and (wrong := wrong_names(given, schema)):
        return wrong
    try:
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:  # NaN, lone surrogates, endless numbers and nesting
        return f"the arguments can't be written as JSON: {first_line(problem)}"
    try:
        validator = _bounded(validator_for(schema))(schema, registry=Registry(), format_checker=count())
        error = next(iter(validator.iter_errors(given)), None)
    except Exception:  # references that lead nowhere, to no schema or in circles, other dialects of patterns
        return given
    if error is None:
        return given
    place = ".".join(map(str, error.absolute_path))
    return f"argument '{place}': {error.message}" if place else str(error.message)


@cache
def _bounded(kind: Any) -> Any:
    """A kind of validator without UNCHECKED, that follows MOST_REFERENCES and then raises OverflowError. It counts them
    by its `format_checker`, which all validators within it share, and which is otherwise of no use here."""
    from jsonschema.validators import extend

    def followed(validator: Any, *rest: Any) -> Iterator[Any]:
        if next(validator.format_checker) > MOST_REFERENCES:
            raise OverflowError
        yield from kind.VALIDATORS["$ref"](validator, *rest) or ()

    def additional(validator: Any, *rest: Any) -> Iterator[Any]:
        if "patternProperties" not in rest[-1]:  # a pattern may be what names them
            yield from kind.VALIDATORS["additionalProperties"](validator, *rest) or ()

    checks = {**dict.fromkeys(UNCHECKED, lambda *_: ()), "$ref": followed, "additionalProperties": additional}
    return extend(kind, checks)


def text_arguments(call: ToolCall, parameters: Mapping[str, Any]) -> str | None:
    """Describes an error in a call's arguments under a schema whose properties are all strings, or None.

    An optional argument may also be null."""
    if wrong := call.parse_error or wrong_names(call.arguments, parameters):
        return wrong
    for name, value in call.arguments.items():
        if not isinstance(value, str) and (name in parameters.get("required", ()) or value is not None):
            return f"argument '{name}' must be a string, got {type(value).__name__}"
    return None
