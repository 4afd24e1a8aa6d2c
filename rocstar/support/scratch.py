"""Folders for unfinished work on the disk of its result: the next process removes those that a kill left. And the
folder of what can be made again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocstar.errors import naming
from rocstar.sandbox.walls import folders


@contextmanager
def scratch(parent: Path, prefix: str, result: Path) -> Iterator[Path]:
    """A new folder in `parent`, deleted at the end, with those of this prefix whose processes were killed. Raises
    OSError, which names `result` where it named no file."""
    folders.sweep(parent, prefix)
    folder, lock = parent / f"{prefix}{os.urandom(6).hex()}", None
    try:
        with naming(result):
            with suppress(FileExistsError):  # made, on a file system without locks; there none is swept either
                lock = folders.make_locked(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def cache_home() -> Path:
    """$XDG_CACHE_HOME/rocstar, ~/.cache/rocstar by default. Raises OSError for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home; set XDG_CACHE_HOME", "~/.cache") from None
    return Path(base) / "rocstar"
