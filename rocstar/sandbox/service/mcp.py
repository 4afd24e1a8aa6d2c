"""What MCP clients (modelcontextprotocol.io) get: `run_python` runs a program, `python_session` a cell of a notebook.
Streamable HTTP at /mcp, or stdin and stdout. Needs the `mcp` extra, which takes most of a second to load and is loaded
by the first request.

A program that fails is a result; only a failure of ours is an error of the tool. A notebook is named by an argument and
is not that of the MCP connection: clients open a connection for each call as they like.
"""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from rocstar.sandbox.call import Call, Response, ServiceOutcome
from rocstar.sandbox.service.core import BadRequest, Service
from rocstar.sandbox.service.native import CellShape, HeldSessions, OpenSession, limits_of

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = (
    "Runs Python in a sandbox. run_python: every program is a fresh process and nothing is kept. python_session: cells "
    "of a notebook; pass on the session it returns, and names and files of earlier cells are there."
)


def server_of(service: Service, sessions: HeldSessions) -> "MCPServer[None]":
    """An MCP server whose tools run programs of the service."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from pydantic import Field

    server: MCPServer[None] = MCPServer("rocstar-sandbox", instructions=INSTRUCTIONS, log_level="ERROR")
    Code = Annotated[str, Field(description="Python; the value of its last expression is returned.")]

    def shown(response: Response) -> dict[str, Any]:
        """What a model is told. Raises ToolError where we are at fault."""
        if isinstance(response.outcome, ServiceOutcome):
            raise ToolError(f"the sandbox could not run the program ({response.outcome}): {response.message}")
        names = ("outcome", "stdout", "value", "run_seconds", "isolation")
        return {name: getattr(response, name) for name in names} | {"stderr": response.stderr or response.message}

    async def run_python(
        code: Code,
        stdin: Annotated[str, Field(description="Standard input.")] = "",
        wall_seconds: Annotated[float | None, Field(gt=0, description="Limit on the run time, seconds.")] = None,
    ) -> dict[str, Any]:
        """Run a Python program in a sandbox without network; numpy and sympy are at hand. Nothing is kept."""
        settings = service.settings
        try:
            limits = limits_of(settings, **({} if wall_seconds is None else {"wall_seconds": wall_seconds}))
        except BadRequest as error:
            raise ToolError(str(error)) from None
        call = Call(id="", code=code, stdin=stdin, limits=limits, patience_seconds=settings.patience_seconds)
        return shown(await service.run(call))

    async def python_session(
        code: Code,
        session: Annotated[str, Field(description="As an earlier cell returned it; empty opens a new one.")] = "",
    ) -> dict[str, Any]:
        """Run a cell of a Python notebook in the sandbox: it sees names and files of the cells before it. `state_lost`
        says that the cell ended the notebook's process: names and files are gone."""
        try:
            held = await (sessions.find(session) if session else sessions.open(OpenSession()))
            response = await sessions.run(held, CellShape(code=code))
        except BadRequest as error:
            raise ToolError(str(error)) from None
        return shown(response) | {"session": held.session.name, "state_lost": response.state_lost}

    async def close_python_session(session: Annotated[str, Field(description="As python_session returned it.")]) -> str:
        """End a notebook and forget it."""
        try:
            await sessions.close(await sessions.find(session))
        except BadRequest as error:
            raise ToolError(str(error)) from None
        return "closed"

    for tool in (run_python, python_session, close_python_session):
        server.add_tool(tool)
    return server


class McpEndpoint:
    """MCP's streamable HTTP as an ASGI application, without connection state of its own. `_live` is a task that lasts
    as long as the service, starts with the first request, and holds the package's session manager open."""

    def __init__(self, service: Service, sessions: HeldSessions) -> None:
        self.service, self.sessions = service, sessions
        self.loading: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.loading is None:
            self.loading = asyncio.create_task(self._load())
        try:
            handle = await asyncio.shield(self.loading)
        except ModuleNotFoundError as error:
            told = f"{error.name} is not installed with this service; rocstar's extra mcp brings what /mcp needs"
            raise BadRequest(told, 501) from None
        await handle(scope, receive, send)

    async def _load(self) -> ASGIApp:
        server = await asyncio.to_thread(server_of, self.service, self.sessions)
        from mcp.server.transport_security import TransportSecuritySettings

        # Made for its session manager, which is all we serve of it; hosts and origins are the application's business.
        unguarded = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(stateless_http=True, json_response=True, transport_security=unguarded)
        ready = asyncio.Event()
        self.life = asyncio.create_task(self._live(server.session_manager, ready))
        await ready.wait()
        handle: ASGIApp = server.session_manager.handle_request
        return handle

    async def _live(self, manager: Any, ready: asyncio.Event) -> None:
        async with manager.run():
            ready.set()
            await asyncio.Event().wait()
