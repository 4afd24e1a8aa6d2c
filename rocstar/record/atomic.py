"""Atomic writes of files and folders: a kill or a full disk leaves the old state or the new one. Not for appending (see
journal.py). Leftovers of a kill have names that `sweep` knows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NEW, OLD = ".new", ".old"
"""Suffixes of unfinished paths, and of paths being deleted."""


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: readers see the old file or the new one. Raises OSError, leaving nothing behind."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` when the block succeeds. Raises OSError, leaving nothing behind."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}{NEW}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # the error of a failed write lacks the path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which replaces `path` when the block succeeds.

    By then all its files are on the disk and readable by those who may read the folder (some libraries write files for
    their owner only). If the block fails nothing changes. Raises OSError."""
    fresh, old = (path.with_name(f".{path.name}{ending}") for ending in (NEW, OLD))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        _settle(fresh)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def half_written(folder: Path) -> list[Path]:
    """Unfinished writes below `folder`, left by a kill or under way."""
    return [path for path in folder.rglob("*") if path.name.endswith((NEW, OLD))]


def sweep(folder: Path) -> None:
    """Delete unfinished writes below `folder`. Only for its single writer."""
    for leftover in half_written(folder):
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _settle(folder: Path) -> None:
    mode = folder.stat().st_mode & 0o666  # as the umask set it
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(mode)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Sync a folder: a rename is only durable once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically. Raises OSError."""
    write_atomic(path, (json.dumps(plain(value), indent=2) + "\n").encode())


def plain(value: Any) -> Any:
    """`value` in JSON's own types: numbers that JSON lacks (nan, inf) become null, unknown objects their text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)
