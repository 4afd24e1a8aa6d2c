"""The frames between a client and a daemon. The same bytes go over a Unix socket and, as messages of a WebSocket, over
a network.

    client -> daemon   CALL (a Call)   CANCEL   CLOSE (a session's name)   PING
    daemon -> client   HELLO (a DaemonInfo) or REFUSED (a sentence), as the first frame
                       RESPONSE (a Response) or LOST (the session is gone), exactly one for each CALL
                       USAGE (a Usage), shortly after responses and for each PING

A frame is a header and a body. The header's number identifies the call on this connection, so that a gateway can pass
a body on under another number without reading it; its upper 24 bits identify the caller (`caller_of`), for turns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from msgspec import msgpack

from rocstar.sandbox.call import Call, DaemonInfo, Response, Usage

MAX_FRAME_BYTES = 64 * 2**20  # far above a call with 10 MB of source and stdin; stops a peer that sends without end
HEADER = struct.Struct("!IBQ")
"""Bytes of the body, kind, number."""
CALLER_SHIFT = 40


class FrameKind(IntEnum):
    CALL = 1
    CANCEL = 2
    CLOSE = 3
    PING = 4
    HELLO = 5
    REFUSED = 6
    RESPONSE = 7
    LOST = 8
    USAGE = 9


class Frame(NamedTuple):
    kind: FrameKind
    number: int
    body: bytes


encode = msgpack.Encoder().encode
"""A Call, a Response, a DaemonInfo, a Usage or a text as the body of a frame. Raises UnicodeEncodeError for text that
is not valid Unicode."""
decode_response = msgpack.Decoder(Response).decode
"""The inverse; raises `msgspec.DecodeError` (or UnicodeDecodeError) on anything else, as do the others."""
decode_info = msgpack.Decoder(DaemonInfo).decode
decode_usage = msgpack.Decoder(Usage).decode
decode_text = msgpack.Decoder(str).decode


_decode_call = msgpack.Decoder(Call).decode


def decode_call(body: bytes) -> Call:
    """The decoder bounds each field (`call.FEW`); the check here stops a million repeated fields. Raises ValueError
    and RecursionError."""
    head = {b"\xde": 3, b"\xdf": 5}.get(body[:1])  # its length in bytes; a short map of msgpack has at most 15 fields
    count, most = int.from_bytes(body[1:head]) if head else 0, len(Call.__struct_fields__)
    if count > most:
        raise ValueError(f"the call has {count} fields; there are only {most}")
    return _decode_call(body)


def pack(kind: FrameKind, number: int = 0, body: bytes = b"") -> bytes:
    """A frame's bytes."""
    return HEADER.pack(len(body), kind, number) + body


def caller_of(number: int) -> int:
    """The caller of the call with this number; 0 if a connection has one caller."""
    return number >> CALLER_SHIFT


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def size(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames completed by `data`. Raises ValueError on a frame that is too long or of unknown kind."""
        pending, start = self._pending, 0
        pending += data
        try:
            while len(pending) - start >= HEADER.size:
                length, kind, number = HEADER.unpack_from(pending, start)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                end = start + HEADER.size + length
                if len(pending) < end:
                    return
                body = bytes(memoryview(pending)[start + HEADER.size : end])
                start = end
                yield Frame(FrameKind(kind), number, body)
        finally:
            del pending[:start]
