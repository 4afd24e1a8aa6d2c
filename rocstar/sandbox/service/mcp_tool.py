"""What the service offers to MCP clients (modelcontextprotocol.io): `run_python` runs a program, `python_session` a
cell of a notebook. Needs the `mcp` extra.

A failed program is a result; only a failure of ours is an error of the tool. A notebook is named by an argument and is
not that of the MCP connection: clients open a connection per call as they like, one connection may want several
notebooks, and over HTTP any worker may answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from rocstar.sandbox.wire import ServiceOutcome

Answer = Mapping[str, Any]
"""A Response as the native API gives it."""

INSTRUCTIONS = (
    "Runs Python in a sandbox. run_python: every program is a fresh process and nothing is kept. python_session: cells "
    "of a notebook; pass on the session it returns, and names and files of earlier cells are there."
)
Code = Annotated[str, Field(description="Python; the value of its last expression is returned.")]


class Refused(Exception):
    """The cell was not run; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """How programs are run."""

    run: Callable[[str, str, float | None], Awaitable[Answer]]
    """(code, stdin, wall_seconds or None for the default)."""
    open_session: Callable[[], Awaitable[str]]
    """The id of a new notebook. Raises Refused."""
    run_cell: Callable[[str, str], Awaitable[Answer]]
    """(id, code). Raises Refused."""
    close_session: Callable[[str], Awaitable[None]]
    """Raises Refused."""


class Ran(BaseModel):
    """What became of the program."""

    outcome: str = Field(description="ok, exception, exit_nonzero, signal, wall_timeout, cpu_timeout, memory, ...")
    stdout: str = Field(description="What it printed.")
    stderr: str = Field(description="Same; ends with the traceback.")
    value: str | None = Field(description="repr of the last expression, if it has one.")
    run_seconds: float = Field(description="How long it ran.")
    isolation: str = Field(description="L1 to L4; a larger number is stronger.")

    @classmethod
    def of(cls, answer: Answer, **more: Any) -> Self:
        """Raises ToolError where we are at fault."""
        if answer["outcome"] in {outcome.value for outcome in ServiceOutcome}:
            raise ToolError(f"the sandbox could not run the program ({answer['outcome']}): {answer['message']}")
        told = {name: answer[name] for name in ("outcome", "stdout", "value", "run_seconds", "isolation")}
        return cls(**told, stderr=answer["stderr"] or answer["message"], **more)


class RanCell(Ran):
    """What became of the cell."""

    session: str = Field(description="Pass it with the next cell.")
    committed: bool = Field(description="Whether later cells see what it did; not so when a limit ended it.")


def server_of(runner: Runner) -> MCPServer[None]:
    """An MCP server whose tools run programs by `runner`."""
    server: MCPServer[None] = MCPServer("rocstar-sandbox", instructions=INSTRUCTIONS, log_level="ERROR")

    @server.tool()
    async def run_python(
        code: Code,
        stdin: Annotated[str, Field(description="Standard input.")] = "",
        wall_seconds: Annotated[float | None, Field(gt=0, description="Limit on the run time, seconds.")] = None,
    ) -> Ran:
        """Run a Python program in a sandbox without network; numpy and sympy are at hand. Nothing is kept."""
        try:
            return Ran.of(await runner.run(code, stdin, wall_seconds))
        except Refused as error:
            raise ToolError(str(error)) from None

    @server.tool()
    async def python_session(
        code: Code,
        session: Annotated[str, Field(description="As an earlier cell returned it; empty opens a new one.")] = "",
    ) -> RanCell:
        """Run a cell of a Python notebook in the sandbox: it sees names and files of the cells before it."""
        try:
            name = session or await runner.open_session()
            answer = await runner.run_cell(name, code)
        except Refused as error:
            raise ToolError(str(error)) from None
        return RanCell.of(answer, session=name, committed=answer["committed"])

    @server.tool()
    async def close_python_session(session: Annotated[str, Field(description="As python_session returned it.")]) -> str:
        """End a notebook and forget it."""
        try:
            await runner.close_session(session)
        except Refused as error:
            raise ToolError(str(error)) from None
        return "closed"

    return server
