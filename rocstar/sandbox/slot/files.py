"""Files of a call in the working directory: written before a program runs, read back for the caller who asks for them.

Runs behind the walls. Reading follows no link, neither at the end of a path nor on the way. What cannot be read is left
out: the caller sees by its absence that it is not there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress

MAX_BYTES = 16 * 2**20  # of content read back together
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not keep us waiting


def write(files: Mapping[str, bytes]) -> str:
    """Write each to its path relative to the working directory; why one could not be written, in a sentence, or ""."""
    for path, content in files.items():
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        except (OSError, ValueError) as error:
            return f"the file {path[:200]!r} could not be written: {error}"
    return ""


def sizes(files: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """How the head of a report announces them."""
    return [(path, len(content)) for path, content in files.items()]


def read(paths: Sequence[str]) -> dict[str, bytes]:
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
