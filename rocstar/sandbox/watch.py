"""A look at the processes of calls that run for long, where no group counts their memory or their number (`groups`).

Consumes nothing; wakes every LOOK_SECONDS while the host lives, samples the calls that have run that long, and ends
those that are over a limit. The host sees /proc and no program can touch it. What a call does in less time than that is
not seen: it is bounded by the limits of each process alone.
Not covered: memory in files of the working directory, and that of sessions, whose stopped states cannot be told apart.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rocstar.sandbox.groups import HEADROOM_BYTES

LOOK_SECONDS = 0.25  # short programs, nearly all of them, are never looked at
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHARES = ("Pss_Anon:", "Pss_Shmem:")  # of pages that several processes have, to each its part


class Watched(Protocol):
    """What the watch needs of a lane."""

    process: int
    """The slot's or its guardian's; 0 where nothing can be seen of it."""
    started: float
    """When its call began, of the monotonic clock, seconds; infinite while idle."""
    memory_limit: int
    """Of the whole call, bytes; 0 where it need not be watched."""
    processes_limit: int
    """Of the call, the slot's own included; 0 where it need not be watched."""

    def stop(self, limit: str) -> None: ...


async def watch(lanes: Callable[[], Iterable[Watched]], proc: Path = Path("/proc")) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        due = time.monotonic() - LOOK_SECONDS
        for lane in [lane for lane in lanes() if lane.process and lane.started < due]:
            passed = over(lane, proc)
            if passed:
                lane.stop(passed)


def over(lane: Watched, proc: Path) -> str:
    """Which limit this call is over, `processes` or `memory`; else nothing."""
    if not lane.memory_limit and not lane.processes_limit:
        return ""
    family = descendants(lane.process, proc)
    if lane.processes_limit and sum(threads(pid, proc) for pid in family) > lane.processes_limit:
        return "processes"
    limit = lane.memory_limit + HEADROOM_BYTES
    if not lane.memory_limit or sum(resident(pid, proc) for pid in family) <= limit:
        return ""  # what is shared was counted more than once even so: the dear look is for those that may be over
    return "memory" if sum(share(pid, proc) for pid in family) > limit else ""


def can_see(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether the children of a process are listed here, which not every kernel does."""
    return (proc / f"{pid}/task/{pid}/children").exists()


def descendants(pid: int, proc: Path) -> list[int]:
    """All that a process has started and what that has started; it is where their orphans go. Not itself."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError, ValueError):  # gone
            for thread in os.listdir(proc / f"{parent}/task"):
                children = [int(child) for child in (proc / f"{parent}/task/{thread}/children").read_text().split()]
                found += children
                waiting += children
    return found


def threads(pid: int, proc: Path) -> int:
    try:
        return len(os.listdir(proc / f"{pid}/task"))
    except OSError:
        return 0


def resident(pid: int, proc: Path) -> int:
    """Memory of this process alone or shared since a fork, bytes: what is there, but for files. Cheap to ask for."""
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
