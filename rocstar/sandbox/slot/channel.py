"""The bytes between the daemon, a slot and the programs in it: plain structs and marshalled values only. Also the
files of a call: written to the working directory before its program runs, and read afterwards if the caller fetches
them, behind the walls; reading follows no symbolic link in any part of a path.

The daemon owns every pipe of a call; a slot sees only descriptors, so the memory that the next call's process is forked
from contains no data of an earlier call.

    daemon -> slot      RUN, with three descriptors: stdout, stderr, control
    daemon -> slot      SIGUSR1: end the running program
    slot -> daemon      ENDED, exactly one for each byte; a slot that cannot serve another call then exits
    daemon -> program   on control: LENGTH, then a marshalled Program or NotebookPayload
    program -> daemon   on control: LENGTH, then a report (hostile: see `daemon.verdict`), then one of its files
    daemon -> notebook  on control: LENGTH, then a marshalled CellPayload; the notebook answers each with a report
                        Fork and a descriptor for its files: after its report the notebook waits for GO
    daemon -> branch    on control: Become and descriptors of a snapshot, then a NotebookPayload, answered with a report
"""

from __future__ import annotations

import json
import marshal
import os
import socket
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

RUN = b"R"
CONTROL = 3
"""Descriptor of the control socket in a program's process."""

LENGTH = struct.Struct("=I")

MAX_TYPE, MAX_MESSAGE = 500, 2000  # characters of an exception that are reported beside the traceback
MAX_VALUE_BYTES = 192 * 2**10  # leaves room for the exception in a report of 256 KiB
MAX_FILES_BYTES = 16 * 2**20  # of returned files, together
MAX_IMAGES_BYTES = 8_000_000  # together

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not keep us waiting

GO = b"g"
"""The byte that lets a waiting notebook continue, and the byte sent along with descriptors."""

ENDED = struct.Struct("=i??ddddQ?")
"""The fields of an Ended. Daemon and slot share a machine: native order, no padding, a packed struct in `_fork.c`."""


class Ended(NamedTuple):
    """How a process forked by a slot ended."""

    wait_status: int
    """As returned by `os.waitpid`."""
    stopped: bool
    """The slot received SIGUSR1 before the process ended, perhaps from a program: the daemon knows if it sent one."""
    stale: bool
    """Nothing was run: an earlier call started processes, whose number this call could observe in its process ids."""
    run_seconds: float
    """From the fork to the end of the program's process."""
    cpu_seconds: float
    """CPU of all processes of the call."""
    own_cpu_seconds: float
    """CPU of the program's first process alone, its threads included."""
    slot_cpu_seconds: float
    """CPU of the slot and of everything that it has run since it started."""
    peak_memory_bytes: int
    """Largest resident set of one process."""
    reusable: bool
    """False: the slot exits after this report."""


class Program(NamedTuple):
    """One program. Plain values: marshalled as a tuple, fast to read."""

    code: str
    stdin: str
    files: dict[str, bytes]
    fetch: tuple[str, ...]
    seed: int
    cpu_seconds: float
    memory_bytes: int
    output_bytes: int
    processes: int


class NotebookPayload(NamedTuple):
    """Start a session's process, which runs cells until its control connection closes. A copied notebook begins with it
    too, for its seed."""

    seed: int
    memory_bytes: int
    processes: int


class CellPayload(NamedTuple):
    """One cell of a session."""

    number: int
    code: str
    files: dict[str, bytes]
    fetch: list[str]
    output_bytes: int


class Fork(NamedTuple):
    """Wait while the daemon copies this process."""


class Become(NamedTuple):
    """Become the copy of a notebook, in a fresh process of the same zygote."""

    memory_bytes: int
    processes: int
    folder: str
    umask: int
    offset: int
    """Position of the steps in the snapshot's file."""
    steps: int


Payload = Program | NotebookPayload | CellPayload | Fork | Become
PAYLOADS: dict[str, type] = {kind.__name__: kind for kind in Payload.__args__}


def pack(payload: Payload) -> bytes:
    """Length and body as bytes for control."""
    body = marshal.dumps((type(payload).__name__, tuple(payload)))
    return LENGTH.pack(len(body)) + body


def receive(control: int) -> Any:
    """In the program's process: the next payload, which only the daemon can send. Raises EOFError at its end."""
    (size,) = LENGTH.unpack(read(control, LENGTH.size))
    name, values = marshal.loads(read(control, size))
    return PAYLOADS[name](*values)


def read(control: int, size: int) -> bytes:
    data = os.read(control, size)
    if len(data) < size:
        whole = bytearray(data)
        while len(whole) < size:
            more = os.read(control, min(size - len(whole), 2**20))
            if not more:
                raise EOFError
            whole += more
        data = bytes(whole)
    return data


def send_descriptors(control: int, descriptors: Sequence[int]) -> None:
    """Raises OSError."""
    with socket.socket(fileno=os.dup(control)) as connection:
        socket.send_fds(connection, [GO], descriptors)


def receive_descriptors(control: int, count: int) -> list[int]:
    """Raises EOFError unless exactly `count` arrive."""
    with socket.socket(fileno=os.dup(control)) as connection:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, count)
    if len(descriptors) != count:
        raise EOFError
    return descriptors


def send_report(control: int, head: Mapping[str, object], tail: Iterable[bytes] = ()) -> None:
    """Write the head and the tail of a report. Raises OSError if the daemon no longer reads."""
    tail = [*tail]
    for part in (report_head(head, sum(map(len, tail))), *tail):
        data = memoryview(part)
        while data:
            data = data[os.write(control, data) :]


def report_head(head: Mapping[str, object], tail_bytes: int = 0) -> bytes:
    """Length, `head` as JSON, and a newline. Fields of a head, all optional: `exception` (type, message, line or null),
    `value` (its bytes in the tail), `dropped` (bytes of the value that are not), `status` (a cell's exit status),
    `files` (path and size of each), `images` (size of each), `refused` (why a cell was not run). The tail is the value,
    the files and the images, in the order of the head."""
    body = json.dumps(head, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    return LENGTH.pack(len(body) + tail_bytes) + body


def write_files(files: Mapping[str, bytes]) -> str:
    """Write each to its path relative to the working directory; a sentence on the first that could not be, or ""."""
    for path, content in files.items():
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        except (OSError, ValueError) as error:
            return f"the file {path[:200]!r} could not be written: {error}"
    return ""


def read_files(paths: Sequence[str]) -> dict[str, bytes]:
    """Each that exists and fits into the rest of MAX_FILES_BYTES. Paths are relative to the working directory."""
    found: dict[str, bytes] = {}
    room = MAX_FILES_BYTES
    for path in paths:
        with suppress(OSError, ValueError):
            found[path] = content(path, room)
            room -= len(found[path])
    return found


def content(path: str, room: int) -> bytes:
    """Raises OSError or ValueError unless it is a regular file of at most `room` bytes below the working directory."""
    *folders, name = os.path.normpath(path).split("/")
    if os.path.isabs(path) or ".." in (*folders, name):
        raise ValueError(f"{path!r} is not below the working directory")
    parent = os.open(".", FOLDER)
    try:
        device = os.fstat(parent).st_dev
        for folder in folders:
            inner = os.open(folder, FOLDER, dir_fd=parent)
            os.close(parent)
            parent = inner
        with open(os.open(name, FILE, dir_fd=parent), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_dev != device or state.st_size > room:
                raise ValueError(f"{path!r} is not a file of at most {room} bytes")
            return file.read(state.st_size)
    finally:
        os.close(parent)
