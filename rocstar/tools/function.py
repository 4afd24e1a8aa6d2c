"""A plain typed function as a tool. It is the user's own code: it runs in this process and not in the sandbox.

    def density(material: str) -> float:
        \"\"\"Density of a material in grams per cubic centimetre.\"\"\"

*Not* limited: memory, CPU, and a function that never returns. Its call still ends with TIMEOUT, but its thread keeps
running, and when too many are left behind the tool becomes unavailable.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from rocstar.errors import ConfigError, Unavailable, first_line, is_shortage
from rocstar.protocols import ToolSpec
from rocstar.support.plugins import copied, in_words, run_in_daemon_thread, time_limit
from rocstar.tools.arguments import bad_call, ran_here
from rocstar.types import Status, ToolCall, ToolResult

AT_ONCE = 32  # calls of one function that run at the same time; further ones wait
MAX_LEFT_BEHIND = 64  # threads of abandoned calls that have not returned

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ARGUMENTS = re.compile(r"^(Args|Arguments|Parameters):\s*$")
SECTION = re.compile(r"^\w[\w ]*:\s*$")
ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class FunctionTool:
    """Implements `Tool`. The model sees the function's name, docstring and annotations.

    A plain function runs in a thread, an `async def` on the event loop, each call for at most `timeout_seconds`. The
    return value is the output: text unchanged, anything else as JSON if possible; more than `output_bytes` is an
    OUTPUT_LIMIT. An exception is a CODE_ERROR that the model reads, except `rocstar.errors.Unavailable` and one because
    this machine has run out of disk, memory or open files, which are service failures."""

    def __init__(
        self, function: Callable[..., Any], *, timeout_seconds: float, output_bytes: int | None = None, said: str = ""
    ) -> None:
        """output_bytes: of a call's text that are kept. said: the setting that names it, for messages. Raises
        ConfigError if a model can't call it."""
        self._function = function
        self._seconds = timeout_seconds
        self._most = output_bytes
        self.spec, self._model = signature_of(function, said or function.__name__)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._left_behind = list[Future[Any]]()

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises Unavailable when the function does, or when too many of its calls never came back."""
        if call.parse_error is not None:
            return bad_call(call, call.parse_error)
        arguments = self._checked(call.arguments)
        if isinstance(arguments, str):
            return bad_call(call, arguments)
        requested = time.monotonic()
        async with self._places:
            began = time.monotonic()
            status, text = await self._outcome(arguments)
            ended = time.monotonic()
        return ran_here(call, status, text, asked=requested, began=began, ended=ended, most=self._most)

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments to call with, or an error message. Null counts as an omitted optional argument."""
        optional = {field.alias for field in self._model.model_fields.values() if not field.is_required()}
        given = {name: value for name, value in arguments.items() if value is not None or name not in optional}
        try:
            made = self._model.model_validate(copied(given))  # the call is recorded as the model made it
        except RecursionError:
            return "the arguments are nested too deeply"
        except ValidationError as error:
            return self._complaint(error)
        fields = self._model.model_fields
        return {str(fields[place].alias): getattr(made, place) for place in made.model_fields_set}

    def _complaint(self, error: ValidationError) -> str:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            return f"argument '{name}' is missing"
        if first["type"] == "extra_forbidden":
            names = ", ".join(self.spec.parameters["properties"]) or "no arguments"
            return f"unknown argument '{name}'; this tool takes {names}"
        return f"argument '{name}': {first['msg']}"

    async def _outcome(self, arguments: dict[str, Any]) -> tuple[Status, str]:
        run = self._awaited if inspect.iscoroutinefunction(self._function) else self._threaded
        try:
            async with time_limit(self._seconds) as limit:
                return Status.OK, await run(arguments)
        except Unavailable:
            raise
        except Exception as error:  # the user's function may raise anything, a TimeoutError of its own included
            if isinstance(error, TimeoutError) and limit.expired():
                return Status.TIMEOUT, ""
            if is_shortage(error):
                raise Unavailable(f"{self.spec.name} could not work: {in_words(error)}") from error
            return Status.CODE_ERROR, f"{in_words(error)}\n"

    async def _awaited(self, arguments: dict[str, Any]) -> str:
        """A coroutine that ends the process or cancels itself has failed; it must not do that to the run."""
        task = asyncio.current_task()
        try:
            return _written(await self._function(**arguments))
        except (SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run cancels it
            raise RuntimeError(in_words(error)) from error

    async def _threaded(self, arguments: dict[str, Any]) -> str:
        """Run in a thread; abandoned calls are counted until they return."""
        self._left_behind = [call for call in self._left_behind if not call.done()]
        if (left := len(self._left_behind)) >= MAX_LEFT_BEHIND:
            raise Unavailable(f"{left} calls of {self.spec.name} were given up and have not returned")
        call = partial(self._function, **arguments)
        ended = run_in_daemon_thread(lambda: _written(call()), f"tool {self.spec.name}")
        try:
            return await asyncio.wrap_future(ended)
        except asyncio.CancelledError:
            self._left_behind.append(ended)
            raise


def _written(value: Any) -> str:
    """Raises what the value's own methods raise, and ValueError, RecursionError for numbers and lists without end."""
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, too
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


# The description of a function for the model


def signature_of(function: Callable[..., Any], said: str) -> tuple[ToolSpec, type[BaseModel]]:
    """The spec of a function with a docstring and an annotation for each parameter, Google style descriptions optional;
    and what checks its arguments: fields are named by position, their aliases are the names.

    said: the setting that names it, for messages. Raises ConfigError for a function that a model can't call."""
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
        # Fields are named by position: a parameter may be called `json` or `_x`, which a pydantic field may not.
        fields[f"a{place}"] = (parameter.annotation, Field(default, alias=name, description=about.get(name)))
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(f"{said}: its arguments cannot be written as JSON: {first_line(error)}") from None
    return ToolSpec(name=function.__name__, description=description, parameters=_plain_schema(schema)), model


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
    """Without pydantic's titles, which repeat the names; `required` and `properties` always exist."""
    properties = {
        name: {key: inner for key, inner in value.items() if key != "title"}
        for name, value in schema.get("properties", {}).items()
    }
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": properties, "required": schema.get("required", []), **definitions}
