"""A typed function as a tool: what the model is told, what it may pass, what becomes of exceptions and hung calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from rocstar.errors import ConfigError, Unavailable
from rocstar.tools import function as function_module
from rocstar.tools.function import FunctionTool
from rocstar.types import Status, ToolCall, ToolResult


def convert(amount: float, unit: Literal["mile", "inch"], places: int = 2, json: bool = False) -> object:
    """Converts a length
    to metres.

    Longer words for people.

    Args:
        amount: How many.
        unit (str): Of which unit,
            in the singular.

    Returns:
        amount: not an argument.
    """
    return round(amount * {"mile": 1609.344, "inch": 0.0254}[unit], places)


async def later(word: str) -> str:
    """Says a word a moment later."""
    await asyncio.sleep(0.3 if word == "late" else 0)
    return word


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


def called(tool: FunctionTool, **arguments: Any) -> ToolResult:
    return asyncio.run(tool.run(ToolCall(id="c", tool=tool.spec.name, arguments=arguments, raw="")))


def made(function: Callable[..., Any], seconds: float = 1.0) -> FunctionTool:
    return FunctionTool(function, timeout_seconds=seconds)


async def test_a_call_that_ends_while_the_run_is_stopped_for_longer_than_its_limit_is_not_late() -> None:
    def prompt() -> str:
        """Ends soon."""
        time.sleep(0.1)
        return "done"

    asyncio.get_running_loop().call_soon(time.sleep, 0.5)
    call = ToolCall(id="c", tool="prompt", arguments={}, raw="")
    assert (await made(prompt, seconds=0.3).run(call)).stdout == "done"


def test_the_model_is_told_name_first_paragraph_types_and_arguments() -> None:
    spec = made(convert).spec
    assert (spec.name, spec.description) == ("convert", "Converts a length to metres.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "description": "How many."},
            "unit": {"type": "string", "enum": ["mile", "inch"], "description": "Of which unit, in the singular."},
            "places": {"type": "integer", "default": 2},
            "json": {"type": "boolean", "default": False},
        },
        "required": ["amount", "unit"],
    }


def test_arguments_arrive_typed_and_optional_ones_may_be_left_out() -> None:
    assert called(made(convert), amount="2", unit="inch").stdout == "0.05"
    assert called(made(convert), amount=2, unit="inch", places=None).stdout == "0.05"
    assert called(made(convert), amount=2, unit="mile", places=0).stdout == "3219.0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"amount": 2, "unit": "foot"}, "argument 'unit': Input should be 'mile' or 'inch'"),
        ({"amount": "two", "unit": "mile"}, "argument 'amount': Input should be a valid number"),
        ({"amount": 2, "unit": "mile", "colour": 1}, "unknown argument 'colour'; this tool takes amount, unit, places"),
    ],
)
def test_arguments_that_do_not_fit_are_a_bad_call(arguments: dict[str, Any], said: str) -> None:
    result = called(made(convert), **arguments)
    assert result.status is Status.BAD_CALL
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(
    ("value", "text"),
    [("as it is\n", "as it is\n"), (7, "7"), ({"é": [1, None]}, '{"é": [1, null]}'), (None, "null"), ({1}, "{1}")],
)
def test_text_is_shown_as_it_is_and_anything_else_as_json_where_it_can_be(value: object, text: str) -> None:
    def give() -> object:
        """Gives a value."""
        return value

    assert called(made(give)).stdout == text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such city"), "ValueError: no such city\n"),
        (TimeoutError("no such city"), "TimeoutError: no such city\n"),
        (SystemExit(3), "RuntimeError: SystemExit: 3\n"),
        (concurrent.futures.CancelledError("its pool"), "RuntimeError: CancelledError: its pool\n"),
        (Mute(), "Mute (its text cannot be read)\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_function_raises_is_for_the_model_to_read_and_ends_the_call_only(
    error: BaseException, told: str
) -> None:
    def look() -> str:
        """Looks."""
        raise error from error

    result = called(made(look))
    assert (result.status, result.stdout) == (Status.CODE_ERROR, "") and result.stderr.endswith(told), result


def test_a_service_that_is_down_is_a_fault_of_ours() -> None:
    class IndexDown(Unavailable):
        pass

    def look() -> str:
        """Looks."""
        raise IndexDown("the index is down")

    with pytest.raises(IndexDown):
        called(made(look))

    def note() -> str:
        """Notes."""
        raise OSError(28, "No space left on device")

    with pytest.raises(Unavailable, match=r"note could not work: OSError: .* No space left"):
        called(made(note))


def test_a_coroutine_function_is_awaited_and_cancelled_at_its_time() -> None:
    assert called(made(later), word="now").stdout == "now"
    assert called(made(later, seconds=0.05), word="late").status is Status.TIMEOUT


def test_calls_run_at_the_same_time_but_not_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_module, "AT_ONCE", 3)
    running, most, lock = 0, 0, threading.Barrier(3)

    def meet() -> str:
        """Waits for two others."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        lock.wait(timeout=5)
        running -= 1
        return "met"

    async def all_calls() -> list[ToolResult]:
        tool = made(meet, seconds=10)
        call = ToolCall(id="c", tool="meet", arguments={}, raw="")
        return await asyncio.gather(*(tool.run(call) for _ in range(6)))

    results = asyncio.run(all_calls())
    assert [result.stdout for result in results] == ["met"] * 6
    assert most == 3


async def test_calls_that_never_return_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_module, "MAX_LEFT_BEHIND", 2)
    released = threading.Event()

    def hang() -> str:
        """Hangs."""
        released.wait(10)
        return "back"

    tool = made(hang, seconds=0.02)
    call = ToolCall(id="c", tool="hang", arguments={}, raw="")
    assert [(await tool.run(call)).status for _ in range(2)] == [Status.TIMEOUT] * 2
    with pytest.raises(Unavailable, match="2 calls of hang were given up and have not returned"):
        await tool.run(call)
    released.set()
    again: Any = None
    while isinstance(again, Unavailable) or again is None or again.status is Status.TIMEOUT:  # on a busy machine
        (again,) = await asyncio.gather(tool.run(call), return_exceptions=True)
    assert again.stdout == "back"


def no_words(a: str) -> str:
    return a


def no_types(a) -> str:  # type: ignore[no-untyped-def]
    """A tool."""
    return str(a)


def many(*names: str) -> str:
    """A tool."""
    return ""


def unwritable(a: threading.Lock) -> str:
    """A tool."""
    return ""


def misspelt(a: strr) -> str:  # type: ignore[name-defined]  # noqa: F821
    """A tool."""
    return ""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_words, "no_words has no docstring"),
        (no_types, "argument 'a' has no annotation"),
        (many, "is not an argument with a name"),
        (unwritable, "its arguments cannot be written as JSON"),
        (misspelt, "an annotation cannot be read: name 'strr' is not defined"),
    ],
)
def test_a_function_that_no_model_could_call_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(function)


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("value", "told"),
    [(10**5000, "ValueError: "), (nested(100_000), "RecursionError: "), (Mute(), "ValueError: no words")],
    ids=["too many digits", "nested", "mute"],
)
def test_a_value_that_cannot_be_written_fails_its_call_only(value: object, told: str) -> None:
    def give() -> object:
        """Gives a value."""
        return value

    async def give_later() -> object:
        """Gives a value."""
        return value

    for function in (give, give_later):
        result = called(made(function))
        assert result.status is Status.CODE_ERROR and result.stderr.startswith(told), result


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("its own")])
def test_a_coroutine_that_ends_the_process_or_cancels_itself_fails_its_call_only(error: BaseException) -> None:
    async def look() -> str:
        """Looks."""
        raise error

    result = called(made(look))
    assert (result.status, result.stderr) == (Status.CODE_ERROR, f"RuntimeError: {type(error).__name__}: {error}\n")


async def test_a_coroutine_that_the_run_cancels_is_cancelled() -> None:
    call = ToolCall(id="c", tool="later", arguments={"word": "late"}, raw="")
    running = asyncio.create_task(made(later, seconds=5).run(call))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_what_a_function_does_to_its_arguments_is_not_recorded_as_the_models_call() -> None:
    def add(things: Any, inner: dict[str, Any]) -> str:
        """Adds."""
        things.append("mine")
        inner["of"]["more"] = 1
        return "added"

    call = ToolCall(id="c", tool="add", arguments={"things": ["a"], "inner": {"of": {}}}, raw="")
    assert asyncio.run(made(add).run(call)).stdout == "added"
    assert call.arguments == {"things": ["a"], "inner": {"of": {}}}
    too_deep = called(made(add), things=nested(5000), inner={})
    assert (too_deep.status, too_deep.stderr) == (Status.BAD_CALL, "the arguments are nested too deeply")
