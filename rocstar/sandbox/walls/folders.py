"""Folders on the machine's disk: the working folder of a slot without its own file system, and the removal of anything
that a program made in it. Also the locks that distinguish folders of running daemons from others."""

from __future__ import annotations

import glob
import os
import stat
import sys
from contextlib import suppress

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))
"""Folder that contains this package, for interpreters that must import it."""
FILE_BYTES = 64 * 2**20  # largest file a program may write; the size of its tmpfs too
MAX_TRIES = 10  # a sweep may come between making a folder and locking it
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Path = str | os.PathLike[str]
CLOSED = 0o111
"""Mode of a slot's folder: programs pass through it to `run`. They can neither list it nor create, move or remove
anything in it, and so leave no trace in it."""


class WorkFolder:
    """A slot's folder. Programs work in its subfolder `run`, which the keeper makes anew for each. Programs of other
    slots under the same user cannot guess the folder's name. Both methods raise OSError."""

    def __init__(self, prefix: str, user: int | None) -> None:
        """Make it. prefix: of its path. user: owner of `run`; None: the current user."""
        self.path = f"{prefix}-{os.urandom(8).hex()}"
        self.run = f"{self.path}/run"
        self.user = user
        os.makedirs(os.path.dirname(self.path), 0o711, exist_ok=True)  # slots pass through it, and do not list it
        os.mkdir(self.path)
        self.renew()

    def renew(self) -> None:
        """Remove everything in the folder, and make `run`."""
        os.chmod(self.path, 0o700)
        empty(self.path)
        os.mkdir(self.run, 0o700)
        if self.user is not None:
            os.chown(self.run, self.user, self.user)
        os.chmod(self.path, CLOSED)


def remove(folder: str) -> None:
    """Remove a folder with everything in it. Raises OSError."""
    os.chmod(folder, 0o700)
    empty(folder)
    os.rmdir(folder)


def empty(folder: str) -> None:
    """Remove everything in `folder`, at any depth and with any permissions; links are removed, never followed, and
    mounts stay. Raises OSError, also if a process that still runs puts a link in the place of a folder.

    Folders are moved up before they are entered: a path can be longer than any call accepts."""
    top = os.open(folder, FOLDER)
    try:
        waiting, device = ["."], os.fstat(top).st_dev
        while waiting:
            if subfolders := clear(top, waiting[-1], device):
                waiting += subfolders
            elif (current := waiting.pop()) != ".":
                os.rmdir(current, dir_fd=top)
    finally:
        os.close(top)


def clear(top: int, name: str, device: int) -> list[str]:
    """Remove what is in a folder of the folder `top`, but move its own folders to `top`: their names there."""
    moved: list[str] = []
    here = os.open(name, FOLDER, dir_fd=top)
    try:
        for entry in os.listdir(here):
            state = os.lstat(entry, dir_fd=here)
            if state.st_dev != device:
                continue
            if not stat.S_ISDIR(state.st_mode):
                os.unlink(entry, dir_fd=here)
                continue
            if state.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                shut = os.open(entry, os.O_PATH | FOLDER, dir_fd=here)
                try:
                    os.chmod(f"/proc/self/fd/{shut}", 0o700)  # by its name it would follow a link
                finally:
                    os.close(shut)
            moved.append(f".removed-{os.urandom(8).hex()}")
            os.rename(entry, moved[-1], src_dir_fd=here, dst_dir_fd=top)
    finally:
        os.close(here)
    return moved


def make_locked(folder: Path) -> int:
    """Make a folder that only the current user may list; return the descriptor that holds its lock until it is closed
    or this process ends. Raises OSError."""
    for _ in range(MAX_TRIES):
        os.mkdir(folder, 0o711)
        lock = try_lock(folder)
        if lock is not None:
            return lock
    raise OSError(f"the new folder {folder} could not be locked")


def try_lock(folder: Path) -> int | None:
    """The descriptor that now holds the folder's lock; None if another process holds it or the folder is gone."""
    import fcntl  # not in a zygote, whose every fork would copy its mappings

    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(folder)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def sweep(parent: Path, prefix: str) -> None:
    """Remove the current user's folders with this prefix that no running process has locked."""
    with os.scandir(parent) as entries:
        left = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in left:
        with suppress(OSError):  # gone, or the next start tries again
            is_ours = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            lock = try_lock(entry.path) if is_ours else None
            if lock is not None:
                try:
                    remove(entry.path)
                finally:
                    os.close(lock)


def package_folders() -> list[str]:
    """Folders in which this process finds installed packages, a user's own included; a checkout is not one of them."""
    return [folder for folder in sys.path if os.path.isabs(folder) and glob.glob(f"{glob.escape(folder)}/*.dist-info")]
