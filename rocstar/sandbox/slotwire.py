"""The bytes between the host and a slot. Plain structs: a slot never builds objects from a program's data, so the
next program, which is a fork of it, finds nothing of this one in memory.

    host -> slot   b"R" REQUEST payload      run; the payload is a Task, which only the forked child reads, and behind
                                             it the files to fetch: a list of paths, marshalled, or nothing
                   b"C"                      cancel what runs; ignored when idle
    slot -> host   ANSWER stdout stderr report files
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from rocstar.sandbox import wire

RUN = b"R"
CANCEL = b"C"

REQUEST = struct.Struct("=IdII")
"""payload bytes, wall seconds, output bytes, how many of the payload's bytes are the files to fetch."""

ANSWER = struct.Struct("=iB?ddQQQd?IIII")
"""The fields of an Answer. Host and slot are one machine: native order, no padding, as a packed struct in `_fork.c`."""

REPORT_BYTES = 256 * 1024
"""Room for what the child says of itself: the value and the exception."""


class Task(NamedTuple):
    """What a program's process has to know of its request. Plain values, marshalled as a tuple: quick to read."""

    code: str
    stdin: str
    files: dict[str, str | bytes]
    seed: int
    cpu_seconds: float
    memory_bytes: int
    output_bytes: int
    processes: int


def pack_task(message: Mapping[str, Any]) -> bytes:
    """From a request as `wire.request_message` makes it."""
    files = {path: wire.unpacked_file(content) for path, content in message["files"].items()}
    values = {**message, "files": files}
    return marshal.dumps(tuple(values[name] for name in Task._fields))


def pack_run(message: Mapping[str, Any], task: bytes) -> bytes:
    """All that the host sends for a run."""
    fetch = marshal.dumps(list(message["fetch"])) if message["fetch"] else b""
    size = len(task) + len(fetch)
    head = REQUEST.pack(size, message["wall_seconds"], message["output_bytes"], len(fetch))
    return b"".join((RUN, head, task, fetch))


def parse_fetch(payload: bytes) -> list[str]:
    return list(marshal.loads(payload)) if payload else []


class Ended(IntEnum):
    """Who ended the program."""

    ITSELF = 0
    WALL = 1
    OUTPUT = 2
    CANCELLED = 3


class Answer(NamedTuple):
    wait_status: int
    """As `os.wait4` gives it."""
    ended: int
    """An Ended."""
    reusable: bool
    """False: something could not be reset, and the slot ends itself after this answer."""
    run_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    dropped_stdout: int
    """Bytes read and thrown away, past the cap."""
    dropped_stderr: int
    slot_cpu_seconds: float
    """CPU of the slot and of all its programs since it started, seconds."""
    committed: bool
    """Of a session's cell: later cells start from what it left."""
    stdout_bytes: int
    stderr_bytes: int
    report_bytes: int
    files_bytes: int
    """Of the fetched files, as `fetch.packed` makes it."""

    @property
    def body_bytes(self) -> int:
        return self.stdout_bytes + self.stderr_bytes + self.report_bytes + self.files_bytes
