"""What the daemon sees and ends of processes through the host's /proc, which no program can touch.

`watch` is a look at calls that run for long, where no group counts their memory or their processes. What a call does in
less time than LOOK_SECONDS is not seen: it is bounded by the limits of each process alone. Not covered: memory in files
of the working directory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rocstar.sandbox.call import Limits
from rocstar.sandbox.walls.cgroups import HEADROOM_BYTES

LOOK_SECONDS = 0.25  # short programs, nearly all of them, are never looked at
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")  # a second
SHARES = ("Pss_Anon:", "Pss_Shmem:")  # of pages that several processes have, to each its part
DEAD = (b"Z", b"X")  # states


class Watched(Protocol):
    """What the watch needs of a worker."""

    process: int
    """Of the slot."""
    started: float
    """When its call began, by the monotonic clock, seconds; infinite while idle."""
    limits: Limits
    """Of the call."""
    uncounted: frozenset[str]
    """What neither a group nor the kernel counts for a whole call: `memory`, `processes`."""
    on_passed: Callable[[str], None] | None
    """To be called with the limit that was passed."""


async def watch(workers: Callable[[], Iterable[Watched]], also: Callable[[], None], proc: Path = Path("/proc")) -> None:
    """Every LOOK_SECONDS look at the calls that have run for so long, have those ended that are over a limit, and call
    `also`. Until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        also()
        due = time.monotonic() - LOOK_SECONDS
        for worker in workers():
            if worker.uncounted and worker.started < due and worker.on_passed is not None:
                passed = over(worker, proc)
                if passed:
                    worker.on_passed(passed)


def over(worker: Watched, proc: Path) -> str:
    """Which limit this call is over, `processes` or `memory`; else nothing."""
    family = descendants(worker.process, proc)
    if "processes" in worker.uncounted and sum(threads(pid, proc) for pid in family) > worker.limits.processes:
        return "processes"
    limit = worker.limits.memory_bytes + HEADROOM_BYTES
    if "memory" not in worker.uncounted or sum(resident(pid, proc) for pid in family) <= limit:
        return ""  # shared pages were counted more than once even so: the exact figure is expensive
    return "memory" if sum(share(pid, proc) for pid in family) > limit else ""


def can_see(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether the children of a process are listed here, which not every kernel does."""
    return (proc / f"{pid}/task/{pid}/children").exists()


def children(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Oldest first, of each thread. Empty when it is gone."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with open(f"{proc}/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """All that a process has started and what that has started; it is where their orphans go. Not itself."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop(), proc)
        found += below
        waiting += below
    return found


def kill_others(slot: int, kept: int) -> bool:
    """Kill all that lives below the slot but for `kept`; whether there was nothing. What is killed is stopped before,
    so that it cannot fork on; it takes a moment to die, and its orphans come to the slot: call it again."""
    others = [pid for pid in descendants(slot) if pid != kept and not is_dead(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            with suppress(OSError):
                os.kill(pid, number)
    return not others


def is_dead(pid: int) -> bool:
    """Also of one that only waits to be collected."""
    fields = stat(pid)
    return not fields or fields[0] in DEAD


def stat(pid: int) -> list[bytes]:
    """Fields of its stat file, from the state on; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """CPU of a process with all its threads; 0 when it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def cpu_seconds_with_children(pid: int) -> float:
    """And of those children that it has waited for."""
    fields = stat(pid)
    return cpu_seconds(pid) + (int(fields[13]) + int(fields[14])) / TICKS if fields else 0.0


def peak_bytes(pid: int) -> int:
    """Largest resident set so far; 0 when it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        _, found, rest = file.read().partition(b"VmHWM:")
        return 1024 * int(rest.split(None, 1)[0]) if found else 0
    return 0


def threads(pid: int, proc: Path) -> int:
    try:
        return len(os.listdir(proc / f"{pid}/task"))
    except OSError:
        return 0


def resident(pid: int, proc: Path) -> int:
    """Memory of this process alone or shared since a fork, bytes, but for files. Cheap to ask for."""
    try:
        _, there, files, *_ = (proc / f"{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(there) - int(files)) * PAGE_BYTES


def share(pid: int, proc: Path) -> int:
    """Its fair part of all memory it has, bytes; all of it where the kernel does not tell."""
    try:
        lines = (proc / f"{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return resident(pid, proc)
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(SHARES))
