"""One connection between router and node: length-prefixed JSON frames over a not blocking socket.

A plain socket and not an asyncio transport, so that a connection outlives the event loop that reads it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rocstar.sandbox.outbox import Outbox

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 128 * 2**20  # one call with the largest program and input, escaped, fits
STRANGER_FRAME_BYTES = 2**20  # from a peer that has not shown that it knows the token
SPLIT_BYTES = 4 * 2**20  # a list that is longer travels in several frames
READ_BYTES = 2**18
ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Link:
    """Consumes frames and hands each to `on_message`; tells `on_end` once when the other side is gone or sends what
    cannot be a frame. Nothing is told after `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_end: Callable[[], None] = lambda: None
        self.limit = STRANGER_FRAME_BYTES
        self.loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self._unread = bytearray()
        self._outbox = Outbox(connection)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and write from this loop on."""
        self.loop = loop
        loop.add_reader(self.socket.fileno(), self._readable)
        self._outbox.attach(loop)

    def detach(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.socket.fileno())
        self._outbox.detach()
        self.loop = None

    def send(self, message: Mapping[str, Any]) -> None:
        self._send_body(ENCODE(message).encode())

    def send_list(self, kind: str, items: Iterable[bytes], **more: Any) -> None:
        """A message of this kind with a list of the same name; the items are JSON already."""
        head = ENCODE({"kind": kind, **more})[:-1].encode() + b',"' + kind.encode() + b'":['
        self._send_body(head + b",".join(items) + b"]}")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.detach()
            self.socket.close()

    def _send_body(self, body: bytes) -> None:
        if not self.closed:
            self._outbox.send(HEADER.pack(len(body)) + body)

    def _readable(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                raise EOFError
            self._unread += data
            self._consume()
        except (EOFError, ValueError):  # gone, or not one of ours
            if not self.closed:
                self.close()
                self.on_end()

    def _consume(self) -> None:
        while not self.closed and len(self._unread) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._unread)
            if length > self.limit:
                raise ValueError(f"a frame of {length} bytes is over the limit of {self.limit}")
            end = HEADER.size + length
            if len(self._unread) < end:
                return
            message = json.loads(self._unread[HEADER.size : end])
            del self._unread[:end]
            self.on_message(message)


def split(items: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The items in order, in lists that make frames of bearable length."""
    part: list[bytes] = []
    size = 0
    for item in items:
        part.append(item)
        size += len(item)
        if size > SPLIT_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
