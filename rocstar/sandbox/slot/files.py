"""Files of a call in the working directory: written before a program runs, read back for the caller who asks for them.

Runs behind the walls. Reading follows no link, neither at the end of a path nor on the way. What cannot be read is left
out: the caller sees by its absence that it is not there. `pack` and `unpack` carry all files over to a branch.
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
    """Each that is there and fits into what is left of MAX_FILES_BYTES. Relative to the working directory."""
    found: dict[str, bytes] = {}
    room = MAX_FILES_BYTES
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


def pack(folder: str, target: int) -> str:
    """Write all that a folder holds to an empty file, or why that cannot be, in a sentence."""
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
    """What `pack` has written. Raises OSError."""
    folders = []
    with open(source, "rb", 0, closefd=False) as packed:
        while entry := marshal.load(packed):
            name, mode, changed, link, size = entry
            path = f"{folder}/{name}"
            if link:
                os.symlink(link, path)
                continue
            if stat.S_ISDIR(mode):
                os.mkdir(path)
                folders.append((path, mode, changed))
                continue
            with open(path, "wb", 0) as file:
                send(file.fileno(), source, size)
            finish(path, mode, changed)
    for each in reversed(folders):
        finish(*each)


def finish(path: str, mode: int, changed: int) -> None:
    os.chmod(path, stat.S_IMODE(mode))
    os.utime(path, ns=(changed, changed))


def send(target: int, source: int, size: int) -> None:
    while size > 0:
        sent = os.sendfile(target, source, None, size)
        if not sent:
            raise OSError("it became shorter")
        size -= sent


def below(folder: str, device: int) -> Iterator[str]:
    """All paths on the folder's own disk, folders before what they hold."""
    for entry in os.scandir(folder):
        if entry.stat(follow_symlinks=False).st_dev == device:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path, device)
