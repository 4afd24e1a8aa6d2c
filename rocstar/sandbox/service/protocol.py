"""uvicorn's HTTP/1.1 protocol with bounds it lacks: how long a request may take to arrive, how long its headers may
be, and how many connections there may be.

Not here: the size of the body (`http.read_body`).
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024
SPARE_DESCRIPTORS = 256  # for the host's socket, files, and connections on their way out


def refusal(status: str, sentence: str) -> bytes:
    """A whole response, for a connection that has no request yet."""
    body = b'{"error":"%b"}' % sentence.encode()
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


FULL = refusal("503 Service Unavailable\r\nretry-after: 1", "too many connections are open; come again in 1 s")
TOO_SLOW = refusal("408 Request Timeout", "the request did not arrive in time")
TOO_LARGE = refusal("431 Request Header Fields Too Large", f"the headers are longer than {MAX_HEADER_BYTES} bytes")


@dataclass(slots=True)
class Doorkeeper:
    """Knows the connections whose request has begun and not arrived whole; `sweep` closes those that take too long."""

    request_seconds: float
    max_connections: int
    waiting: dict[BoundedProtocol, float] = field(default_factory=dict)
    """Since when, by the loop's clock; oldest first."""

    def sweep(self, now: float) -> None:
        for protocol, since in list(self.waiting.items()):
            if now - since < self.request_seconds:
                return
            del self.waiting[protocol]
            protocol.transport.write(TOO_SLOW)
            protocol.transport.close()


class BoundedProtocol(HttpToolsProtocol):
    doorkeeper: Doorkeeper
    """Set on a subclass made by `bounded`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.leaving = False
        """The next answer is the last one here."""
        self.header_bytes: int | None = 0
        """Of the request that is arriving; None while its body is."""
        if len(self.connections) > self.doorkeeper.max_connections:
            transport.write(FULL)
            transport.close()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.doorkeeper.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.doorkeeper.waiting.setdefault(self, self.loop.time())
        if self.header_bytes is not None:
            self.header_bytes += len(data)
        super().data_received(data)
        if self.header_bytes is not None and self.header_bytes > MAX_HEADER_BYTES:
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self.header_bytes = None
        super().on_headers_complete()
        if self.leaving:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self.doorkeeper.waiting.pop(self, None)
        self.header_bytes = 0
        super().on_message_complete()

    def shutdown(self) -> None:
        """uvicorn drains. A connection that looks idle may hold a request that we have not read yet."""
        self.leaving = True
        if not self.has_unread_bytes():
            super().shutdown()

    def has_unread_bytes(self) -> bool:
        descriptor: int = self.transport.get_extra_info("socket").fileno()
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
            return bool(twin.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False


def bounded(request_seconds: float) -> tuple[type[BoundedProtocol], Doorkeeper]:
    """A protocol class of one server's own, and its doorkeeper."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    keeper = Doorkeeper(request_seconds, descriptors - SPARE_DESCRIPTORS)
    members: dict[str, Any] = {"doorkeeper": keeper}
    return type("ServerProtocol", (BoundedProtocol,), members), keeper


def raise_descriptor_limit() -> None:
    """A connection is a descriptor: take all that the operator allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
