"""Serving the page until Ctrl-C: a socket, the token where it leaves loopback, the browser."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from rocstar.support.listen import ended_by_signals, is_loopback, listener, url_of
from rocstar.view.app import application
from rocstar.view.sources import Library

GRACE_SECONDS = 1  # for answers under way


def serve(library: Library, *, host: str, port: int, browser: bool, tell: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM. Raises ConfigError where the address is taken or is none of this machine's."""
    place = listener(host, port)
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    address = url_of(_reachable(host), place.getsockname()[1])
    opened = f"{address}/?token={token}" if token else f"{address}/#{library.first}"
    config = uvicorn.Config(
        application(library, token=token),
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    with ended_by_signals(server):
        tell(f"{library.base} is shown at {opened} (Ctrl-C ends)")
        if browser:
            threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()
        server.run([place])


def _reachable(host: str) -> str:
    """A name under which a browser elsewhere may find this machine."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
