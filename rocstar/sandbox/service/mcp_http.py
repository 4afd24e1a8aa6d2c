"""MCP's streamable HTTP at /mcp. Without sessions of its own: any worker may answer any
request, and what is kept from call to call is named in the call (`mcp_tool`).

The `mcp` package takes most of a second to load, so it is loaded by the first request, in a thread."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from rocstar.sandbox.service.http import Service, told
from rocstar.sandbox.service.shapes import BadRequest

MODULES = ("rocstar.sandbox.service.mcp_tool", "rocstar.sandbox.service.mcp_runner")


class McpEndpoint:
    """An ASGI application. `manager` belongs to a task that lives as long as the worker and starts with the first
    request."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.loading: asyncio.Task[Any] | None = None
        self.stop = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.loading is None:
            self.loading = asyncio.create_task(self.load())
        try:
            handle: ASGIApp = await asyncio.shield(self.loading)
        except ModuleNotFoundError as error:
            missing = BadRequest(f"{error.name} is not installed here; pip install 'rocstar[mcp]' serves /mcp", 501)
            await told(missing)(scope, receive, send)
            return
        await handle(scope, receive, send)

    async def load(self) -> ASGIApp:
        tool, runner = await asyncio.to_thread(lambda: [importlib.import_module(name) for name in MODULES])
        from mcp.server.transport_security import TransportSecuritySettings

        service = self.service
        server = tool.server_of(runner.runner_of(service.settings, service.admission, service.sessions, service.hop))
        # Made for its session manager, which is all we serve of it; hosts and origins are the Guard's business.
        unguarded = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        server.streamable_http_app(stateless_http=True, json_response=True, transport_security=unguarded)
        manager = server.session_manager
        ready = asyncio.Event()
        self.life = asyncio.create_task(self.live(manager, ready))
        await ready.wait()
        handle: ASGIApp = manager.handle_request
        return handle

    async def live(self, manager: Any, ready: asyncio.Event) -> None:
        async with manager.run():
            ready.set()
            await self.stop.wait()
