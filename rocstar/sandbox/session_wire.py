"""The bytes inside a session's slot, and between it and the host.

host -> slot    slotwire's RUN REQUEST, then an Order as payload; CANCEL
slot -> host    slotwire's ANSWER with stdout, stderr and report; then a length and an Outcome as JSON
slot -> state   a length, with three descriptors (the new state's channel, its stdout and stderr), then the Task
state -> slot   READY from the new state, then DONE
"""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Mapping
from typing import NamedTuple

from rocstar.sandbox import wire

LENGTH = struct.Struct("=I")
READY = b"R"
DONE = struct.Struct("=B?Q")
"""Exit status the cell would have had; whether the state may be kept; largest resident set, bytes."""

ROOT = 0  # number of the state before any cell
MAX_STATES = 24  # kept in one slot at once; each counts against the limit on processes


class Order(NamedTuple):
    """One cell. Plain values: marshalled."""

    base: int
    """Number of the state it starts from."""
    new: int
    """Number of the state it leaves, when it is committed."""
    commit: bool
    drop: list[int]
    """States nobody needs any more once this cell is committed."""
    fetch: list[str]
    """Files to send back."""
    task: bytes
    """A slotwire.Task, marshalled; only the new state reads it."""


class Result(NamedTuple):
    """What the slot adds to its answer."""

    committed: bool
    files: Mapping[str, bytes]


def pack_order(order: Order) -> bytes:
    return marshal.dumps(tuple(order))


def parse_order(payload: bytes) -> Order:
    return Order(*marshal.loads(payload))


def pack_result(result: Result) -> bytes:
    body = json.dumps({"committed": result.committed, "files": wire.encoded(result.files)}).encode()
    return LENGTH.pack(len(body)) + body


def parse_result(body: bytes) -> Result:
    said = json.loads(body)
    return Result(said["committed"], wire.decoded(said["files"]))
