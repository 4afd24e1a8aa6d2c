"""What a function's signature and docstring say to a model: description, JSON schema, and a check of arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from rocstar.errors import ConfigError

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ARGUMENTS = re.compile(r"^(Args|Arguments|Parameters):\s*$")
SECTION = re.compile(r"^\w[\w ]*:\s*$")
ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    description: str
    """The docstring up to its first empty line."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    model: type[BaseModel]
    """Checks arguments; fields are named by place, their aliases are the names."""

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments to call with, or what is wrong with them. Null stands for an optional argument left out."""
        optional = {field.alias for field in self.model.model_fields.values() if not field.is_required()}
        given = {name: value for name, value in arguments.items() if value is not None or name not in optional}
        try:
            made = self.model.model_validate(given)
        except ValidationError as error:
            return self._complaint(error)
        fields = self.model.model_fields
        return {str(fields[place].alias): getattr(made, place) for place in made.model_fields_set}

    def _complaint(self, error: ValidationError) -> str:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            return f"argument '{name}' is missing"
        if first["type"] == "extra_forbidden":
            names = ", ".join(self.parameters["properties"]) or "no arguments"
            return f"unknown argument '{name}'; this tool takes {names}"
        return f"argument '{name}': {first['msg']}"


def signature_of(function: Callable[..., Any], said: str) -> Signature:
    """Of a function with a docstring and an annotation for each parameter, Google style descriptions optional.

    said: where the function was named, for messages. Raises ConfigError for a function that a model can't call."""
    description, about = _described(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"{said} has no docstring; its first sentence tells the model what the tool does")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, SyntaxError) as error:
        raise ConfigError(f"{said}: an annotation cannot be read: {error}") from None
    fields: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind not in NAMED:
            raise ConfigError(
                f"{said}: {parameter} is not an argument with a name, and a model passes arguments by name"
            )
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{said}: argument {name!r} has no annotation; write {name}: str, say")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Fields are named by place: a parameter may be called `json` or `_x`, which a pydantic field may not.
        fields[f"a{place}"] = (parameter.annotation, Field(default, alias=name, description=about.get(name)))
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(f"{said}: its arguments cannot be written as JSON: {str(error).splitlines()[0]}") from None
    return Signature(description=description, parameters=_plain_schema(schema), model=model)


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """(first paragraph as one line, argument name -> its text under `Args:`)."""
    first, _, rest = docstring.partition("\n\n")
    about: dict[str, str] = {}
    inside, name = False, ""
    for line in rest.splitlines():
        if SECTION.match(line):
            inside = ARGUMENTS.match(line) is not None
        elif inside and (found := ARGUMENT.match(line)):
            name = found[1]
            about[name] = found[2].strip()
        elif inside and name and line.strip():
            about[name] = f"{about[name]} {line.strip()}"
    return " ".join(first.split()), about


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Without pydantic's titles, which repeat the names; `required` and `properties` are always there."""
    properties = {name: _untitled(value) for name, value in schema.get("properties", {}).items()}
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": properties, "required": schema.get("required", []), **definitions}


def _untitled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key != "title"}
