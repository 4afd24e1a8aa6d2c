"""What a session's slot asks of and does to processes, by their numbers alone: it has no /proc to look into."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress


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


def newest_pid() -> int:
    """The number the kernel gives to the next thing that is started."""
    import threading  # here: it registers what is to be done after forks, and nurseries load us

    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return seen[0]


def cpu_seconds(pid: int) -> float:
    """CPU of a process since it was forked; 0 when it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0
