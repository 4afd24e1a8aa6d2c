"""One writer for each run folder: a lock that the kernel releases whenever its holder dies."""

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
    """Lock `folder` for writing. `name`: a description for messages, such as `run small`.

    The lock file stays after release: only the lock on it counts. Raises ConfigError, which names the holder, if
    another process has it, and if the folder may not be written."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        owner = folder.stat().st_uid
        is_others = owner != os.geteuid() and error.errno != errno.EROFS
        why = f"of user {owner}, who alone may write in" if is_others else f"read-only ({error.strerror}) in"
        raise ConfigError(
            f"{name} is {why} {folder}; go on with a copy that is yours: rocstar train --branch {folder}"
        ) from None
    held = [handle]

    def let_go() -> None:
        while held:
            os.close(held.pop())

    # Else the workers of a pool that a reward function has made would hold it on after this process was killed.
    os.register_at_fork(after_in_child=let_go)
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
        let_go()


def is_written(folder: Path) -> bool | None:
    """Whether the process that signed the lock lives; None if it was signed on another machine. Takes no lock, because
    a writer that starts at this moment would be refused."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
        if found["host"] != socket.gethostname():
            return None
        os.kill(found["pid"], 0)
    except PermissionError:
        return True  # another user's process
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _holder(handle: int) -> str:
    """Describes the holder of the lock, if it has signed already."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
