"""Folders that belong to a living process, and those whose process is dead: it is the lock on the folder that tells,
never its age or a process number, which another process may have by now."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

MAX_TRIES = 10  # a sweep may come between making a folder and locking it


def made_and_locked(name: Callable[[], Path]) -> tuple[Path, int]:
    """A new folder that only we may enter, and the descriptor that holds its lock until it is closed or we die.

    Raises OSError."""
    for _ in range(MAX_TRIES):
        folder = name()
        folder.mkdir(mode=0o711)  # slots may pass through it, not list it
        lock = locked(folder)
        if lock is not None:
            return folder, lock
    raise OSError(f"no folder like {folder} could be locked")


def locked(folder: Path) -> int | None:
    """The descriptor that now holds the folder's lock; None where somebody else does, or the folder is gone."""
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
    """Remove our own user's folders of this kind that nobody holds."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            ours = folder.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        lock = locked(folder) if ours else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
