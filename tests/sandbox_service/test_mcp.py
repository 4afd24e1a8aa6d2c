"""MCP, by the official client: over streamable HTTP and over stdio."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.sandbox.driver import eventually
from tests.sandbox_service.support import Http, running

if TYPE_CHECKING:
    from mcp.client.client import Client

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra [mcp]")


async def check(client: Client) -> None:
    tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == ["run_python", "python_session", "close_python_session"]
    assert set(tools[0].input_schema["properties"]) == {"code", "stdin", "wall_seconds"}
    assert tools[0].input_schema["required"] == ["code"]
    ran = await called(client, code="print(input())\n6 * 7", stdin="hi")
    assert (ran["outcome"], ran["stdout"], ran["value"]) == ("ok", "hi\n", "42")
    failed = await called(client, code="1/0")
    assert failed["outcome"] == "exception" and "ZeroDivisionError" in failed["stderr"]
    late = await called(client, code="while True: pass", wall_seconds=0.3)
    assert late["outcome"] == "wall_timeout"
    wrong = await client.call_tool("run_python", {"code": "1", "wall_seconds": -1})
    assert wrong.is_error
    await check_sessions(client)


async def check_sessions(client: Client) -> None:
    first = await called(client, "python_session", code="x = 20\nopen('f', 'w').write('kept');")
    assert (first["outcome"], first["state_lost"]) == ("ok", False)
    other = await called(client, "python_session", code="x = 'another notebook'")
    assert other["session"] != first["session"]
    again = await called(client, "python_session", code="x += 1\n(x, open('f').read())", session=first["session"])
    assert (again["value"], again["session"]) == ("(21, 'kept')", first["session"])
    failed = await called(client, "python_session", code="x / 0", session=first["session"])
    assert failed["outcome"] == "exception" and "cell 3" in failed["stderr"]
    await client.call_tool("close_python_session", {"session": first["session"]})
    gone = await client.call_tool("python_session", {"code": "x", "session": first["session"]})
    assert gone.is_error and "there is no session" in str(gone.content)
    assert (await called(client, "python_session", code="x", session=other["session"]))["value"] == "'another notebook'"
    await client.call_tool("close_python_session", {"session": other["session"]})


async def called(client: Client, tool: str = "run_python", **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    assert result.structured_content is not None
    content: dict[str, Any] = result.structured_content
    return content


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_runs_programs_over_http(mode: str) -> None:
    from mcp.client.client import Client  # takes seconds, which only who tests it needs to spend

    with running() as url:  # of its own: sessions that tests of other files left would count too
        async with Client(f"{url}/mcp", mode=mode) as client:
            await check(client)
        assert eventually(lambda: Http(url).status("sessions") == 0)


async def test_a_notebook_goes_on_over_other_connections(http: Http) -> None:
    from mcp.client.client import Client

    async with Client(f"{http.url}/mcp") as client:
        session = (await called(client, "python_session", code="seen = [0]"))["session"]
    async with Client(f"{http.url}/mcp") as client:
        assert (await called(client, "python_session", code="seen", session=session))["value"] == "[0]"
        assert not (await client.call_tool("close_python_session", {"session": session})).is_error
        assert (await client.call_tool("close_python_session", {"session": session})).is_error


async def test_the_official_client_runs_programs_over_stdio() -> None:
    from mcp import StdioServerParameters
    from mcp.client.client import Client
    from mcp.client.stdio import stdio_client

    arguments = ["-m", "rocstar", "sandbox", "mcp", "--preload", ""]
    server = StdioServerParameters(command=sys.executable, args=arguments)
    async with Client(stdio_client(server)) as client:
        await check(client)
