"""What the service offers to MCP clients (modelcontextprotocol.io): one tool, `run_python`. Needs the `mcp` extra.

A failed program is a result; only a failure of ours is an error of the tool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from rocstar.sandbox.wire import Response, ServiceOutcome

Run = Callable[[str, str, float | None], Awaitable[Response]]
"""(code, stdin, wall_seconds or None for the default) -> response."""

INSTRUCTIONS = "Runs Python programs in a sandbox. Every program is a fresh process: nothing is kept between calls."


class Ran(BaseModel):
    """What became of the program."""

    outcome: str = Field(description="ok, exception, exit_nonzero, signal, wall_timeout, cpu_timeout, memory, ...")
    stdout: str = Field(description="What it printed.")
    stderr: str = Field(description="Same; ends with the traceback.")
    value: str | None = Field(description="repr of the last expression, if it has one.")
    run_seconds: float = Field(description="How long it ran.")
    isolation: str = Field(description="L1, L2 or L3; a larger number is stronger.")


def server_of(run: Run) -> MCPServer[None]:
    """An MCP server whose tool runs programs by `run`."""
    server: MCPServer[None] = MCPServer("rocstar-sandbox", instructions=INSTRUCTIONS, log_level="ERROR")

    @server.tool()
    async def run_python(
        code: Annotated[str, Field(description="A Python program; the value of its last expression is returned.")],
        stdin: Annotated[str, Field(description="Standard input.")] = "",
        wall_seconds: Annotated[float | None, Field(gt=0, description="Limit on the run time, seconds.")] = None,
    ) -> Ran:
        """Run a Python program in a sandbox without network; numpy and sympy are at hand."""
        response = await run(code, stdin, wall_seconds)
        if isinstance(response.outcome, ServiceOutcome):
            raise ToolError(f"the sandbox could not run the program ({response.outcome}): {response.message}")
        return Ran(
            outcome=response.outcome,
            stdout=response.stdout,
            stderr=response.stderr or response.message,
            value=response.value,
            run_seconds=response.run_seconds,
            isolation=response.isolation,
        )

    return server
