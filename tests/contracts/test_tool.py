"""The promises of a Tool, kept by every implementation: a model's mistake is a result, our fault is an exception."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from rocstar.errors import SandboxUnavailable
from rocstar.protocols import Tool
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.function import FunctionTool
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool
from rocstar.tools.scripted import ScriptedTool
from rocstar.types import Status, ToolCall, ToolResult

GOOD = "print(6 * 7)"
RAISES = "1 / 0"
ENDLESS = "while True: pass"
SCRIPT = {
    GOOD: "42\n",
    RAISES: ToolResult(call_id="", status=Status.CODE_ERROR, stderr="ZeroDivisionError: division by zero\n"),
    ENDLESS: ToolResult(call_id="", status=Status.TIMEOUT, run_seconds=0.3),
}


def function(code: str, input: str = "") -> str:
    """Does what a Python tool would do with the three programs above.

    Args:
        code: One of them.
        input: Not read.
    """
    if code == GOOD:
        return "42\n"
    if code == ENDLESS:
        time.sleep(1.0)
    return str(1 / 0)


def out_of_order(code: str) -> str:
    """A function whose service is down."""
    raise SandboxUnavailable("the service is down")


@pytest.fixture(scope="module")
def sandbox() -> Any:
    with SandboxClient.start(slots=1, preload=()) as client:
        yield client


@pytest.fixture(params=["python", "notebook", "scripted", "function"])
async def tool(request: pytest.FixtureRequest, sandbox: SandboxClient) -> AsyncIterator[Tool]:
    if request.param == "python":
        yield PythonTool(sandbox, Limits(wall_seconds=0.3))
    elif request.param == "notebook":
        async with NotebookTool(sandbox, Limits(wall_seconds=0.3)) as notebook:
            yield notebook
    elif request.param == "function":
        yield FunctionTool(function, timeout_seconds=0.3)
    else:
        yield ScriptedTool(SCRIPT, aliases=("jupyter_code",))


@pytest.fixture(params=["python", "notebook", "scripted", "function"])
async def broken(request: pytest.FixtureRequest) -> AsyncIterator[Tool]:
    """The same tools when what they stand on is gone."""
    if request.param in ("scripted", "function"):
        yield ScriptedTool([]) if request.param == "scripted" else FunctionTool(out_of_order, timeout_seconds=1.0)
        return
    client = SandboxClient.start(slots=1, preload=())
    client.close()
    yield PythonTool(client, Limits()) if request.param == "python" else NotebookTool(client, Limits())


def call(arguments: Mapping[str, Any], *, parse_error: str | None = None) -> ToolCall:
    return ToolCall(id="call-7", tool="python", arguments=arguments, raw="", parse_error=parse_error)


def test_spec_is_a_json_schema_and_aliases_do_not_repeat_the_name(tool: Tool) -> None:
    spec = tool.spec
    assert json.loads(json.dumps(spec.parameters))["type"] == "object"
    assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
    assert spec.name and spec.description
    assert spec.name not in spec.aliases
    assert len(set(spec.aliases)) == len(spec.aliases)


async def test_program_that_goes_well_is_no_error(tool: Tool) -> None:
    result = await tool.run(call({"code": GOOD}))
    assert (result.status, result.stdout, result.is_error, result.call_id) == (Status.OK, "42\n", False, "call-7")


@pytest.mark.parametrize(("code", "status"), [(RAISES, Status.CODE_ERROR), (ENDLESS, Status.TIMEOUT)])
async def test_program_that_fails_is_data(tool: Tool, code: str, status: Status) -> None:
    result = await tool.run(call({"code": code}))
    assert (result.status, result.is_error, result.call_id) == (status, True, "call-7")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "missing"),
        ({"input": "1"}, "missing"),
        ({"code": None}, "string"),
        ({"code": 5}, "string"),
        ({"code": ["print(1)"]}, "string"),
        ({"code": GOOD, "input": 5}, "argument 'input'"),
        ({"code": GOOD, "language": "python"}, "unknown argument"),
    ],
)
async def test_bad_arguments_are_a_bad_call_that_says_why(tool: Tool, arguments: Mapping[str, Any], said: str) -> None:
    result = await tool.run(call(arguments))
    assert (result.status, result.is_error, result.call_id) == (Status.BAD_CALL, True, "call-7")
    assert said in result.stderr
    assert (result.stdout, result.run_seconds, result.isolation) == ("", 0.0, "")


async def test_call_that_did_not_parse_is_a_bad_call_with_the_parse_error(tool: Tool) -> None:
    result = await tool.run(call({}, parse_error="Expecting ',' delimiter"))
    assert (result.status, result.stderr) == (Status.BAD_CALL, "Expecting ',' delimiter")


async def test_optional_argument_may_be_null(tool: Tool) -> None:
    optional = set(tool.spec.parameters["properties"]) - set(tool.spec.parameters["required"])
    assert (await tool.run(call({"code": GOOD, **dict.fromkeys(optional)}))).status is Status.OK


async def test_a_fault_of_ours_is_raised(broken: Tool) -> None:
    with pytest.raises(SandboxUnavailable):
        await broken.run(call({"code": GOOD}))


async def test_a_bad_call_is_data_even_when_the_sandbox_is_down(broken: Tool) -> None:
    assert (await broken.run(call({}))).status is Status.BAD_CALL


async def test_a_cancelled_call_does_not_stand_in_the_way_of_the_next(
    tool: Tool, wait_a_little: Callable[[Any], Any]
) -> None:
    await wait_a_little(tool.run(call({"code": ENDLESS})))
    assert (await tool.run(call({"code": GOOD}))).status is Status.OK


@pytest.fixture
def wait_a_little() -> Callable[[Any], Any]:
    import asyncio

    async def wait(running: Any) -> None:
        task = asyncio.ensure_future(running)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return wait
