"""Files of a call in the working directory: written before a program runs, read afterwards if the caller fetches them.

Runs behind the walls. Reading follows no symbolic link in any part of a path. A file that cannot be read is missing
from the response. `pack` and `unpack` copy all files to a branch.
"""

from __future__ import annotations

import marshal
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from rocstar.sandbox.slot.channel import MAX_FILES_BYTES

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not keep us waiting


def write(files: Mapping[str, bytes]) -> str:
    """Write each to its path relative to the working directory; a sentence on the first that could not be, or ""."""
    for path, content in files.items():
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        except (OSError, ValueError) as error:
            return f"the file {path[:200]!r} could not be written: {error}"
    return ""


def sizes(files: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """The `files` field of a report's head."""
    return [(path, len(content)) for path, content in files.items()]


def read(paths: Sequence[str]) -> dict[str, bytes]:
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


def pack(folder: str, target: int) -> str:
    """Write everything in a folder to an empty file; a sentence if something cannot be copied, else ""."""
    with open(target, "wb", closefd=False) as out:
        for path in below(folder, os.lstat(folder).st_dev):
            try:
                state = os.lstat(path)
                kind, link = stat.S_IFMT(state.st_mode), os.readlink(path) if stat.S_ISLNK(state.st_mode) else ""
                if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                    return f"{path!r:.200} is neither a file nor a folder nor a link; remove it first"
                size = state.st_size if kind == stat.S_IFREG else 0
                marshal.dump((os.path.relpath(path, folder), state.st_mode, state.st_mtime_ns, link, size), out)
                out.flush()
                if size:
                    with open(path, "rb") as file:
                        send(target, file.fileno(), size)
            except OSError as error:
                return f"the file {path!r:.200} could not be copied: {error}"
        marshal.dump(None, out)
    return ""


def unpack(folder: str, source: int) -> None:
    """Restore what `pack` has written. Raises OSError."""
    folders = []
    with open(source, "rb", 0, closefd=False) as packed:
        while entry := marshal.load(packed):
            name, mode, modified, link, size = entry
            path = f"{folder}/{name}"
            if link:
                os.symlink(link, path)
                continue
            if stat.S_ISDIR(mode):
                os.mkdir(path)
                folders.append((path, mode, modified))
                continue
            with open(path, "wb", 0) as file:
                send(file.fileno(), source, size)
            finish(path, mode, modified)
    for each in reversed(folders):
        finish(*each)


def finish(path: str, mode: int, modified: int) -> None:
    os.chmod(path, stat.S_IMODE(mode))
    os.utime(path, ns=(modified, modified))


def send(target: int, source: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if not sent:
            raise OSError("it became shorter")
        size -= sent


def below(folder: str, device: int) -> Iterator[str]:
    """All paths on the folder's own file system, folders before their contents."""
    for entry in os.scandir(folder):
        if entry.stat(follow_symlinks=False).st_dev == device:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path, device)
