"""MCP, by the official client: over streamable HTTP and over stdio."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import StdioServerParameters
from mcp.client.client import Client
from mcp.client.stdio import stdio_client

from tests.sandbox_service.support import Http


async def check(client: Client) -> None:
    tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == ["run_python"]
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


async def called(client: Client, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool("run_python", arguments)
    assert not result.is_error, result
    assert result.structured_content is not None
    return result.structured_content


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_runs_programs_over_http(http: Http, mode: str) -> None:
    async with Client(f"{http.url}/mcp", mode=mode) as client:
        await check(client)


async def test_the_official_client_runs_programs_over_stdio() -> None:
    arguments = ["-m", "rocstar", "sandbox", "mcp", "--preload", ""]
    server = StdioServerParameters(command=sys.executable, args=arguments)
    async with Client(stdio_client(server)) as client:
        await check(client)


def test_a_page_of_another_site_may_not_speak_mcp(http: Http) -> None:
    assert http.post("/mcp", {}, Origin="http://evil.example")[0] == 403
