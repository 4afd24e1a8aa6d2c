"""Bytes on their way into a not blocking socket: what it does not take at once waits, and goes out when it can.

A plain socket and not an asyncio transport, so that a connection outlives the event loop that uses it. Not here: what
the bytes mean, and the way back. Who reads the connection acts on its end; here bytes for one that is gone are dropped.
"""

from __future__ import annotations

import asyncio
import socket


class Outbox:
    """Consumes bytes from `send` or `push`, and writes them in order; a socket that takes bytes again unblocks it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waiting = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def push(self, data: bytes = b"") -> bool:
        """Write what the socket takes now and keep the rest. True: all is out. Callers with their own selector push
        again when the socket is writable."""
        self._waiting += data
        try:
            del self._waiting[: self._socket.send(self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting.clear()
        return not self._waiting

    def send(self, data: bytes) -> None:
        """Write it, after what waits already. Without a loop the rest waits for `attach`."""
        if self._waiting:
            self._waiting += data
        elif not self.push(data) and self._loop is not None:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop write what waits, from now on."""
        self.detach()
        self._loop = loop
        if self._waiting:
            loop.add_writer(self._socket.fileno(), self._on_writable)

    def detach(self) -> None:
        """Let go of the loop, before it or the socket is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_writer(self._socket.fileno())
        self._loop = None

    def _on_writable(self) -> None:
        if self.push() and self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())
