"""Folders for unfinished work, which the next process removes if a kill left them: one belongs to a live process while
that holds its lock, which the kernel releases when it ends. And the folder of what can be made again."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocstar.support.exits import naming


@contextmanager
def scratch(parent: Path, prefix: str, result: Path) -> Iterator[Path]:
    """A `locked_folder`, deleted at the end. Raises OSError, which names `result` where it named no file."""
    with naming(result):
        folder, lock = locked_folder(parent, prefix)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder in `parent` and the descriptor that holds its lock, None on a file system without locks; those of
    this prefix without a holder are removed. Raises OSError."""
    for left in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):  # of another user, or gone
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    return folder, _lock(folder)


def _lock(folder: Path) -> int | None:
    """None where another process holds it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def cache_home() -> Path:
    """$XDG_CACHE_HOME/rocstar, ~/.cache/rocstar by default. Raises OSError for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home; set XDG_CACHE_HOME", "~/.cache") from None
    return Path(base) / "rocstar"
