"""A plain typed function as a tool. It is the user's own code: it runs in this process and not in the sandbox.

    def density(material: str) -> float:
        \"\"\"Density of a material in grams per cubic centimetre.\"\"\"

What is *not* held: memory, CPU, and a function that never returns. Its call ends with TIMEOUT all the same; its thread
goes on, and when too many have been left behind so the tool says that it is unavailable.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rocstar.errors import Unavailable
from rocstar.protocols import ToolSpec
from rocstar.tools.arguments import bad_call
from rocstar.tools.signature import signature_of
from rocstar.types import Status, ToolCall, ToolResult

AT_ONCE = 32  # calls of one function that run at the same time; further ones wait
MAX_LEFT_BEHIND = 64  # threads of calls that were given up and have not returned

_Found = tuple[Any, Exception | None]
"""What a function returned, or what it raised."""


class FunctionTool:
    """Implements `Tool`. The function's name, docstring and annotations are what the model is told.

    A plain function runs in a thread, an `async def` on the event loop, each call for at most `timeout_seconds`. What
    it returns is the output: text as it is, anything else as JSON where it can be. What it raises is a CODE_ERROR
    that the model reads, except `rocstar.errors.Unavailable`: that is a fault of ours, tried again."""

    def __init__(self, function: Callable[..., Any], *, timeout_seconds: float, said: str = "") -> None:
        """said: where the function was named, for messages. Raises ConfigError when a model can't call it."""
        self._function = function
        self._seconds = timeout_seconds
        self._signature = signature_of(function, said or function.__name__)
        self._spec = ToolSpec(
            name=function.__name__, description=self._signature.description, parameters=self._signature.parameters
        )
        self._places = asyncio.Semaphore(AT_ONCE)
        self._left_behind = 0

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises Unavailable when the function does, or when too many of its calls never came back."""
        if call.parse_error is not None:
            return bad_call(call, call.parse_error)
        arguments = self._signature.checked(call.arguments)
        if isinstance(arguments, str):
            return bad_call(call, arguments)
        asked = time.monotonic()
        async with self._places:
            began = time.monotonic()
            status, text = await self._outcome(arguments)
            ended = time.monotonic()
        stdout, stderr = (text, "") if status is Status.OK else ("", text)
        return ToolResult(
            call_id=call.id,
            status=status,
            stdout=stdout,
            stderr=stderr,
            run_seconds=ended - began,
            queue_seconds=began - asked,
        )

    async def _outcome(self, arguments: dict[str, Any]) -> tuple[Status, str]:
        run = self._function if inspect.iscoroutinefunction(self._function) else self._threaded
        try:
            async with asyncio.timeout(self._seconds) as limit:
                value = await run(**arguments)
        except Unavailable:
            raise
        except Exception as error:  # whatever the user's function raises; a TimeoutError of its own included
            if isinstance(error, TimeoutError) and limit.expired():
                return Status.TIMEOUT, ""
            return Status.CODE_ERROR, f"{type(error).__name__}: {error}\n"
        return Status.OK, _written(value)

    async def _threaded(self, **arguments: Any) -> Any:
        """In a thread that no exit of the process waits for."""
        if self._left_behind >= MAX_LEFT_BEHIND:
            raise Unavailable(f"{self._left_behind} calls of {self._spec.name} were given up and have not returned")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Found] = loop.create_future()

        def work() -> None:
            found = _called(self._function, arguments)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._settle, ended, found)

        threading.Thread(target=work, daemon=True, name=f"tool {self._spec.name}").start()
        try:
            value, error = await ended
        except asyncio.CancelledError:
            self._left_behind += 1
            raise
        if error is not None:
            raise error
        return value

    def _settle(self, ended: asyncio.Future[_Found], found: _Found) -> None:
        if ended.cancelled():
            self._left_behind -= 1
        else:
            ended.set_result(found)


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> _Found:
    try:
        return function(**arguments), None
    except Exception as error:
        return None, error
    except BaseException as error:  # SystemExit and its like end the call, not the thread in silence
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
