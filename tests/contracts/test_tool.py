"""The promises of a Tool, kept by every implementation: a model's mistake is a result, our fault is an exception."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rocstar.errors import SandboxUnavailable, Unavailable
from rocstar.protocols import Tool
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.choose import BUILT_IN
from rocstar.tools.function import FunctionTool
from rocstar.types import Status, ToolCall, ToolResult
from tests.scripted import ScriptedTool

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


OTHERS = ("scripted", "function", "mcp")
"""Beside those of BUILT_IN, which need not be named here: a further one is a line in tools/choose.py."""


def built_in(name: str, sandbox: SandboxClient) -> Any:
    return BUILT_IN[name](sandbox, Limits(wall_seconds=0.3), name="tool")


def mcp(folder: Path) -> Any:
    """The first tool of a server of the test's own."""
    pytest.importorskip("mcp", reason="needs the extra [mcp]")
    from rocstar.tools.mcp import mcp_tools

    server = Path(__file__).parents[1] / "tools" / "mcp_server.py"
    return mcp_tools(f"mcp:{sys.executable} {server} {folder}", Limits(wall_seconds=0.3))()[0]


@pytest.fixture(params=[*BUILT_IN, *OTHERS])
async def tool(request: pytest.FixtureRequest, sandbox: SandboxClient, tmp_path: Path) -> AsyncIterator[Tool]:
    if request.param == "function":
        yield FunctionTool(function, timeout_seconds=0.3)
    elif request.param == "scripted":
        yield ScriptedTool(SCRIPT, aliases=("jupyter_code",))
    else:
        made = mcp(tmp_path) if request.param == "mcp" else built_in(request.param, sandbox)
        yield made
        if hasattr(made, "close"):
            await made.close()


@pytest.fixture(params=[*BUILT_IN, *OTHERS])
async def broken(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tool]:
    """The same tools when what they stand on is gone."""
    if request.param == "mcp":
        made = mcp(tmp_path)
        (tmp_path / "gone").touch()
        yield made
        await made.close()
        return
    if request.param in OTHERS:
        yield ScriptedTool([]) if request.param == "scripted" else FunctionTool(out_of_order, timeout_seconds=1.0)
        return
    client = SandboxClient.start(slots=1, preload=())
    client.close()
    yield built_in(request.param, client)


def good(tool: Tool) -> dict[str, Any]:
    """Arguments that fit its schema; a program where it takes one."""
    fitting = {"string": GOOD, "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    properties = tool.spec.parameters["properties"]
    return {name: fitting[properties[name]["type"]] for name in tool.spec.parameters["required"]}


def call(arguments: Mapping[str, Any], *, parse_error: str | None = None) -> ToolCall:
    return ToolCall(id="call-7", tool="python", arguments=arguments, raw="", parse_error=parse_error)


def bad_arguments(tool: Tool) -> list[tuple[dict[str, Any], str]]:
    """(arguments that do not fit its schema, what is said), each wrong in one place."""
    fit, spec = good(tool), tool.spec.parameters
    texts = [name for name, one in spec["properties"].items() if one.get("type") == "string"]
    return [
        *(({key: value for key, value in fit.items() if key != name}, "missing") for name in spec["required"]),
        *(({**fit, name: wrong}, f"'{name}'") for name in texts for wrong in (5, ["print(1)"])),
        *(({**fit, name: None}, f"'{name}'") for name in spec["required"]),
        ({**fit, "language": "python"}, "unknown argument"),
    ]


async def test_what_is_no_call_of_it_is_a_bad_call_that_says_why(tool: Tool) -> None:
    """By its spec, which is a JSON schema."""
    spec = tool.spec
    assert json.loads(json.dumps(spec.parameters))["type"] == "object"
    assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
    assert spec.name and spec.description
    assert spec.name not in spec.aliases and len(set(spec.aliases)) == len(spec.aliases)
    for arguments, said in bad_arguments(tool):
        result = await tool.run(call(arguments))
        assert (result.status, result.is_error, result.call_id) == (Status.BAD_CALL, True, "call-7"), arguments
        assert said in result.stderr
        assert (result.stdout, result.run_seconds, result.isolation) == ("", 0.0, "")
    result = await tool.run(call({}, parse_error="Expecting ',' delimiter"))
    assert (result.status, result.stderr) == (Status.BAD_CALL, "Expecting ',' delimiter")
    optional = set(spec.parameters["properties"]) - set(spec.parameters["required"])
    assert (await tool.run(call({**good(tool), **dict.fromkeys(optional)}))).status is Status.OK, "it may be null"


async def test_a_program_that_fails_or_is_cancelled_is_data_and_the_next_one_goes_well(tool: Tool) -> None:
    if tool.spec.parameters["required"] != ["code"]:
        pytest.skip("it takes no program, and has tests of its own for what it does")
    for code, status in ((GOOD, Status.OK), (RAISES, Status.CODE_ERROR), (ENDLESS, Status.TIMEOUT)):
        result = await tool.run(call({"code": code}))
        assert (result.status, result.is_error, result.call_id) == (status, status is not Status.OK, "call-7")
    running = asyncio.ensure_future(tool.run(call({"code": ENDLESS})))
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    result = await tool.run(call({"code": GOOD}))
    assert (result.status, result.stdout) == (Status.OK, "42\n")


async def test_a_fault_of_ours_is_raised_and_a_bad_call_is_data_all_the_same(broken: Tool) -> None:
    with pytest.raises(Unavailable):
        await broken.run(call(good(broken)))
    assert (await broken.run(call({"language": "python"}))).status is Status.BAD_CALL
