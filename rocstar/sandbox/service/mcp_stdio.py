"""`rocstar sandbox mcp`: one MCP client on stdin and stdout, a sandbox of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, Request, Response

SLOTS = 2  # one model asks; now and then two calls at once


def serve_stdio(*, preload: Sequence[str], min_isolation: str) -> None:
    """Until stdin ends. Raises SandboxDown when the sandbox cannot be started."""
    with SandboxClient.start(slots=SLOTS, preload=preload, min_isolation=min_isolation) as client:
        from rocstar.sandbox.service.mcp_tool import server_of  # after the sandbox: it forks more cheaply while small

        async def run(code: str, stdin: str, wall_seconds: float | None) -> Response:
            limits = Limits() if wall_seconds is None else replace(Limits(), wall_seconds=wall_seconds)
            return await client.run(Request(id="mcp", code=code, stdin=stdin, limits=limits))

        asyncio.run(server_of(run).run_stdio_async())
