"""Files a program leaves behind, read back for the caller who asked for them.

Runs behind the walls, after every process of the program is dead or stopped. Covered: regular files below the working
directory, so many bytes together; no link is followed, neither at the end of a path nor on the way. What cannot be read
is left out without a word: a caller sees by its absence that it is not there.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from rocstar.sandbox import wire

MAX_BYTES = 16 * 2**20  # of content together; in JSON it fits a frame to the client
MAX_PACKED_BYTES = 24 * 2**20  # the same as JSON, with the names; `MAX_FILES_BYTES` in _fork.c
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not keep us waiting


def packed(paths: Sequence[str]) -> bytes:
    """Those of the files that are there, path to content, as JSON; empty when none is."""
    found = fetched(paths)
    return json.dumps(wire.encoded(found)).encode() if found else b""


def fetched(paths: Sequence[str]) -> dict[str, bytes]:
    """Each that is there and fits into what is left of MAX_BYTES. Relative to the working directory."""
    found: dict[str, bytes] = {}
    room = MAX_BYTES
    for path in paths:
        with suppress(OSError, ValueError):
            found[path] = content(path, room)
            room -= len(found[path])
    return found


def content(path: str, room: int) -> bytes:
    """Raises OSError or ValueError where it is no file below the working directory, or larger than `room`."""
    *folders, name = os.path.normpath(path).split("/")
    if os.path.isabs(path) or ".." in (*folders, name):
        raise ValueError(f"{path!r} is not below the working directory")
    here = os.open(".", FOLDER)
    try:
        device = os.fstat(here).st_dev
        for folder in folders:
            inner = os.open(folder, FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        with open(os.open(name, FILE, dir_fd=here), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_dev != device or state.st_size > room:
                raise ValueError(f"{path!r} is not a file of at most {room} bytes")
            return file.read(state.st_size)
    finally:
        os.close(here)
