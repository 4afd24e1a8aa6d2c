"""The sandbox over HTTP: our own API, two dialects, and the gateway."""

from __future__ import annotations

from collections.abc import Callable

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.service.core import CallerTokens, daemon_of, url_of
from rocstar.sandbox.settings import Settings, names


def serve(settings: Settings, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code. `say` receives lines about the start and the address. Raises
    SandboxDown when a daemon cannot be started or a node cannot be reached, OSError when it cannot listen there."""
    if settings.nodes:
        client = SandboxClient.connect(
            names(settings.nodes), token=CallerTokens(settings).first, min_isolation=settings.min_isolation
        )
    else:
        client = SandboxClient(daemon_of(settings), daemons=settings.daemons)
    with client:
        client.launch()  # the daemons preload while the web server is imported
        from rocstar.sandbox.service.server import Server, listen

        listener = listen(settings)
        say("starting; it is ready once its address stands here")
        if not settings.nodes:
            client.await_hello()
        say(f"serving on {url_of(*listener.getsockname()[:2])}  (pages: /v1/status /metrics)")
        Server(settings, client, listener).serve_until_stopped()
    return 0
