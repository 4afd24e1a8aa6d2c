"""Tool schemas: sources write types in many words, here they become JSON schema; and a call is held against its schema.

The check is a small part of JSON schema: known name, required arguments present, no unknown ones, types, enums, and the
same inside objects and lists. Formats, ranges, patterns and `anyOf` are not looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rocstar.data.sft.refusal import Reason, Refused
from rocstar.protocols import ToolSpec

TYPES: Mapping[str, str] = {
    **dict.fromkeys(("string", "str", "char", "text", "date", "datetime"), "string"),
    **dict.fromkeys(("integer", "int", "long", "short", "byte"), "integer"),
    **dict.fromkeys(("number", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "set", "arraylist"), "array"),
    **dict.fromkeys(("object", "dict", "dictionary", "hashmap", "map"), "object"),
    **dict.fromkeys(("null", "none"), "null"),
}
"""Words that sources use for a type. Any other word (`any`) leaves the type open."""

_PYTHON: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def tool_spec(raw: Any, field: str = "tools") -> ToolSpec:
    """A tool from `{"type": "function", "function": {...}}` or from the inner object alone. Raises Refused."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise Refused(Reason.TOOLS, field, "expected tools with a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise Refused(Reason.TOOLS, field, f"{name}: parameters must be an object")
    return ToolSpec(
        name=name,
        description=str(function.get("description") or ""),
        parameters={"type": "object", "properties": {}} | normalised(parameters),
    )


def from_columns(name: str, description: Any, columns: Any, required: Sequence[str]) -> ToolSpec:
    """A tool whose parameters are listed as `{name: {"type": ..., "description": ...}}`. Raises Refused."""
    if not isinstance(columns, Mapping):
        raise Refused(Reason.TOOLS, "tools", f"{name}: parameters must be an object")
    properties = {key: normalised(value) if isinstance(value, Mapping) else {} for key, value in columns.items()}
    parameters = {"type": "object", "properties": properties, "required": [key for key in required if key in columns]}
    return ToolSpec(name=name, description=str(description or ""), parameters=parameters)


def normalised(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with types in JSON schema's words, at every depth; `required` is always a list of known names."""
    made = dict(schema)
    if isinstance(made.get("type"), str):
        word = made.pop("type").strip().lower()
        # `List[int]`, `Tuple[float, float]`, `Dict`: the word before the bracket says the kind.
        made = ({"type": TYPES[word.split("[")[0]]} if word.split("[")[0] in TYPES else {}) | made
    properties = made.get("properties")
    if isinstance(properties, Mapping):
        made["properties"] = {k: normalised(v) if isinstance(v, Mapping) else {} for k, v in properties.items()}
        required = made.get("required")
        made["required"] = [name for name in required if name in properties] if isinstance(required, list) else []
    elif "properties" in made or "required" in made:
        made = {key: value for key, value in made.items() if key not in ("properties", "required")}
    if isinstance(made.get("items"), Mapping):
        made["items"] = normalised(made["items"])
    return made


def check_call(name: str, arguments: Mapping[str, Any], tools: Mapping[str, ToolSpec]) -> None:
    """Raises Refused with what is wrong with a call, naming the argument."""
    if name not in tools:
        raise Refused(Reason.UNKNOWN_TOOL, "tool_calls", f"no tool is called {name!r}; the row lists {len(tools)}")
    _check_object(f"tool_calls.{name}", arguments, {"additionalProperties": False, **tools[name].parameters})


def _check_object(field: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties") or {}
    # An inner object that lists no properties may hold anything; one that lists some, nothing else.
    closed = not schema.get("additionalProperties", not properties)
    for name in schema.get("required", ()):
        if name not in value:
            raise Refused(Reason.MISSING_ARGUMENT, field, f"required argument {name!r} is missing")
    for name, inner in value.items():
        if name in properties:
            _check_value(f"{field}.{name}", inner, properties[name])
        elif closed:
            known = ", ".join(properties) or "none"
            raise Refused(Reason.UNKNOWN_ARGUMENT, field, f"argument {name!r} is not among {known}")


def _check_value(field: str, value: Any, schema: Mapping[str, Any]) -> None:
    wanted = schema.get("type")
    kinds = wanted if isinstance(wanted, list) else [wanted] if isinstance(wanted, str) else []
    if kinds and not any(_is(value, kind) for kind in kinds):
        found = f"{type(value).__name__} {str(value)[:40]!r}"
        raise Refused(Reason.ARGUMENT_TYPE, field, f"expected {' or '.join(kinds)}, got {found}")
    options = schema.get("enum")
    if isinstance(options, list) and options and not isinstance(value, list) and value not in options:
        raise Refused(Reason.ARGUMENT_VALUE, field, f"{str(value)[:40]!r} is not among {str(options)[:80]}")
    if isinstance(value, Mapping):
        _check_object(field, value, schema)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for inner in value:
            _check_value(f"{field}[]", inner, schema["items"])


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _PYTHON[kind]) if kind in _PYTHON else True
