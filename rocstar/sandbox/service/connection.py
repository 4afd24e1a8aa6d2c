"""A small HTTP/1.1 client on asyncio: one keep-alive connection, one request at a time. For `load` and for tests.

Cheap enough (about 25 us a request) that a few processes of it keep a service busy; general enough for nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools


class Closed(Exception):
    """The connection had ended before the request was sent: nothing was asked, nothing is owed."""


class Lost(Exception):
    """The connection ended between the request and the end of its answer."""


@dataclass(slots=True)
class Answer:
    status: int = 0
    """HTTP status."""
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    """Name or address."""
    port: int
    """TCP port."""
    prefix: str = ""
    """Put before every path; a token may stand in it."""
    token: str = ""
    """Sent as a bearer token when not empty."""

    @classmethod
    def of(cls, url: str, token: str = "") -> Address:
        """Raises ValueError for anything but http://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a service; one looks like http://127.0.0.1:8700")
        return cls(host=parts.hostname, port=parts.port or 80, prefix=parts.path.rstrip("/"), token=token)

    def head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {self.host}:{self.port}",
            f"content-length: {length}",
        ]
        if self.token:
            lines.append(f"authorization: Bearer {self.token}")
        return "\r\n".join(lines).encode() + b"\r\ncontent-type: application/json\r\n\r\n"


class Connection(asyncio.Protocol):
    """Made with `open`. `ask` sends and waits; `sink`, if set, gets the pieces of a streamed answer as they come."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.answer = Answer()
        self.pieces: list[bytes] = []
        self.waiter: asyncio.Future[Answer] | None = None
        self.sink: Callable[[bytes], None] | None = None
        self.parser: httptools.HttpResponseParser | None = None

    @classmethod
    async def open(cls, address: Address, local_host: str | None = None) -> Connection:
        """Raises OSError."""
        local = (local_host, 0) if local_host else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(address), address.host, address.port, local_addr=local)
        return connection

    @classmethod
    async def open_local(cls, address: Address, path: str) -> Connection:
        """Over the Unix socket at `path`. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: cls(address), path)
        return connection

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Raises Closed, or Lost."""
        if self.transport.is_closing():
            raise Closed("the service had closed the connection")
        self.answer = Answer()
        self.pieces = []
        self.parser = httptools.HttpResponseParser(self)
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(self.address.head(method, path, len(body)) + body)
        return await self.waiter

    def close(self) -> None:
        self.transport.close()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if self.parser is not None:
            self.parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(Lost(f"the connection ended before the answer ({error or 'closed'})"))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        if self.sink is not None:
            self.sink(body)
        else:
            self.pieces.append(body)

    def on_message_complete(self) -> None:
        assert self.parser is not None and self.waiter is not None
        self.answer.status = self.parser.get_status_code()
        self.answer.body = b"".join(self.pieces)
        self.parser = None
        if self.answer.headers.get("connection") == "close":
            self.transport.close()
        if not self.waiter.done():
            self.waiter.set_result(self.answer)
