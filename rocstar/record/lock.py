"""One writer for each run folder: a lock that the kernel takes back when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rocstar.errors import ConfigError

LOCK = ".lock"


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold `folder` for writing. `name` says in a sentence what it is, such as `run small`.

    The lock file stays when it is let go: only the lock on it counts. Child processes must not inherit it by a fork
    without exec, or they hold it on. Raises ConfigError, which names the holder, when another process has it."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{name} is being written by {_holder(handle)}; wait until it has ended, or stop it first"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise ConfigError(
                f"{name} cannot be locked in {folder} ({error.strerror}); put it on a file system with locks"
            ) from None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)
        yield
    finally:
        os.close(handle)


def is_written(folder: Path) -> bool | None:
    """Whether a process of this machine that signed the lock lives; None where it was signed on another machine. It
    takes no lock: a writer that starts at this moment would be refused."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
        if found["host"] != socket.gethostname():
            return None
        os.kill(found["pid"], 0)
    except PermissionError:
        return True  # somebody else's process
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _holder(handle: int) -> str:
    """Who holds the lock, as far as it has signed yet."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
