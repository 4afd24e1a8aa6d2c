"""What a session's slot asks of and does to processes, by their numbers alone: it has no /proc to look into."""

from __future__ import annotations

import _thread
import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import ModuleType


def kill_group(pid: int) -> None:
    """The process, and what it started that has not left its group: they cannot fork away from this."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def killed_now(pid: int) -> bool:
    """Kill it if it is a process, alive, and one we may signal; whether it was."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False  # none, or a thread of one
    try:
        if select.select([fd], [], [], 0)[0]:
            return False  # dead, and not collected by its parent
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        return False  # somebody else's
    finally:
        os.close(fd)
    return True


def compiled_part() -> ModuleType | None:
    """`_fork`, where the nursery we are a fork of uses it: it can be unwanted, not built, or of no use there."""
    return sys.modules.get("rocstar.sandbox._fork")


def newest_pid() -> int:
    """The number the kernel gives to the next thing that is started."""
    compiled = compiled_part()
    return int(compiled.newest_pid()) if compiled else newest_thread()


def newest_thread() -> int:
    """A thread takes a number as a process does."""
    seen: list[int] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        seen.append(_thread.get_native_id())
        done.release()

    _thread.start_new_thread(run, ())
    done.acquire()
    return seen[0]


def cpu_seconds(pid: int) -> float:
    """CPU of a process since it was forked; 0 when it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0
