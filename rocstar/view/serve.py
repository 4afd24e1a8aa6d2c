"""Serving the page until Ctrl-C: a socket, the token where it leaves loopback, the browser."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from rocstar.errors import ConfigError
from rocstar.view.app import application
from rocstar.view.sources import Library

GRACE_SECONDS = 1  # for answers under way


def serve(library: Library, *, host: str, port: int, browser: bool, tell: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM. Raises ConfigError where the address is taken or is none of this machine's."""
    listener = _listener(host, port)
    token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    address = _address(host, listener.getsockname()[1])
    opened = f"{address}/?token={token}" if token else f"{address}/#{library.first}"
    tell(f"{library.base} is shown at {opened} (Ctrl-C ends)")
    config = uvicorn.Config(
        application(library, token=token),
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    if browser:
        threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()
    uvicorn.Server(config).run([listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(host: str, port: int) -> str:
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
