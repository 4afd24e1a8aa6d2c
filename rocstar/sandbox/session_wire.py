"""The bytes inside a session's slot, and between it and the host.

host -> slot    slotwire's RUN REQUEST, then an Order as payload; CANCEL; RESET
slot -> host    slotwire's ANSWER and what follows it
slot -> state   a length, with three descriptors (the new state's channel, its stdout and stderr), then the Task
state -> slot   READY from the new state, then DONE
"""

from __future__ import annotations

import marshal
import struct
from typing import NamedTuple

LENGTH = struct.Struct("=I")
RESET = b"S"
"""The session has ended, another will come: all states go but the first. No answer; a slot that cannot do it ends."""
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
    task: bytes
    """A slotwire.Task, marshalled; only the new state reads it."""


def pack_order(order: Order) -> bytes:
    return marshal.dumps(tuple(order))


def parse_order(payload: bytes) -> Order:
    return Order(*marshal.loads(payload))
