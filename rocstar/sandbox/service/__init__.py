"""The sandbox over HTTP: our own API, three dialects, and the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.service.core import CallerTokens, Service, Settings

STDIO_SLOTS = 2  # one model asks; now and then two calls at once


def serve(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code. `say` is told that it starts, and where it listens. Raises
    SandboxDown when a daemon cannot be started or a node cannot be reached, OSError when the address cannot be had."""
    if settings.is_gateway:
        client = SandboxClient.connect(
            settings.nodes, token=CallerTokens(settings).first, min_isolation=settings.min_isolation
        )
    else:
        client = SandboxClient(settings.daemon(), daemons=settings.daemons)
    with client:
        client.launch()  # the daemons preload while the web server is imported
        from rocstar.sandbox.service.server import Server, address_of, listen

        listener = listen(settings)
        say("starting; it is ready once its address stands here")
        if not settings.is_gateway:
            client.await_hello()
        say(f"serving on {address_of(listener)}  (pages: /docs /v1/status /metrics)")
        Server(settings, client, listener).serve_until_told()
    return 0


def serve_stdio(*, preload: Sequence[str], min_isolation: str) -> None:
    """Serve one MCP client on stdin and stdout, with a sandbox of its own, until stdin ends. Raises SandboxDown."""
    with SandboxClient.start(slots=STDIO_SLOTS, preload=preload, min_isolation=min_isolation) as client:
        from rocstar.sandbox.service.mcp import server_of
        from rocstar.sandbox.service.native import HeldSessions

        service = Service(Settings(slots=STDIO_SLOTS), client, lambda response: None)
        asyncio.run(server_of(service, HeldSessions(service)).run_stdio_async())
