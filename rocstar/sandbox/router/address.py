"""Where a router listens: `host:port`, `[::1]:port`, or `unix:/path`."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

BACKLOG = 1024


def listen(address: str) -> tuple[socket.socket, str]:
    """A not blocking listener and the address it got (port 0 takes a free one). Raises ValueError and OSError."""
    family, place = parsed(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener, shown(listener)


async def connect(address: str) -> socket.socket:
    """Raises ValueError and OSError."""
    family, place = parsed(address)
    loop = asyncio.get_running_loop()
    target: Any = place
    if not isinstance(place, str):
        found = await loop.getaddrinfo(place[0], place[1], family=family, type=socket.SOCK_STREAM)
        target = found[0][4]
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, target)
    except BaseException:
        connection.close()
        raise
    prompt(connection)
    return connection


def prompt(connection: socket.socket) -> None:
    """Frames are written whole, so waiting for more to send only delays them."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Raises ValueError."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port and not unix:/path")
    bare = host.removeprefix("[").removesuffix("]")
    return socket.AF_INET6 if ":" in bare else socket.AF_INET, (bare, int(port))


def shown(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"
