"""Inspects, limits and kills processes through the host's /proc, which no program can change.

`Forks` limits the processes of a call where programs run as a user whose other processes RLIMIT_NPROC would count with
them: before a process of the slot starts another process or a thread, the kernel asks there
(`walls.seccomp.ask_before_forks`). So a program that forks without end never has more than its call may have.

`watch` checks calls that run for long and whose memory or processes nothing else limits. It does not see peaks
shorter than LOOK_SECONDS: only the limits of each single process bound them. Not covered: memory in files of the
working directory.

`Shortages` tells when the machine, or its container, ran out of disk, memory or processes while a program ran. If the
program failed, it might have ended otherwise, so its failure is no evidence about it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from rocstar.sandbox import container
from rocstar.sandbox.call import ProgramOutcome, Response
from rocstar.sandbox.walls.cgroups import GONE_SECONDS, HEADROOM_BYTES
from rocstar.sandbox.walls.folders import FILE_BYTES

if TYPE_CHECKING:
    from rocstar.sandbox.daemon.worker import Worker

LOOK_SECONDS = 0.25  # short programs, which are nearly all, are never checked
RESOURCES = frozenset({"no_memory_cgroup", "no_process_limit"})
"""Properties that `watch` replaces."""
STARVED_SECONDS = 1.0  # shorter waits are normal on a busy machine
TICKS = os.sysconf("SC_CLK_TCK")  # per second

QUESTION, ANSWER = struct.Struct("=Q72x"), struct.Struct("=Q8xiI")
"""The kernel's seccomp_notif, with its number first, and seccomp_notif_resp."""
RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
CONTINUE = 1
PAUSE_SECONDS = 0.005  # before a count, for those that may be started to appear
COUNTING_SHARE = 0.1  # of the daemon's time that one slot may take by being counted
FAILED = (ProgramOutcome.EXCEPTION, ProgramOutcome.EXIT_NONZERO)


class Forks:
    """Answers the questions of one slot until `close`. A call that has started as many as it may waits a moment, and
    then those alive are counted."""

    def __init__(self, listener: int, slot: int) -> None:
        """slot: its process id."""
        self.listener, self.slot = listener, slot
        self.most = self.left = 0
        """Processes and threads of the call, and how many may be started before the next count."""
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.pause, self.late = PAUSE_SECONDS, 0.0
        """Seconds until it listens again, and how much later than that it listened: for so long the daemon did other
        work, such as to count other slots."""
        self.waiting = select.poll()
        self.waiting.register(listener, select.POLLIN)

    def begin(self, most: int) -> None:
        """A call begins, with its first process."""
        self.most = self.left = most
        self.listen()
        self.pause, self.late = PAUSE_SECONDS, 0.0

    def listen(self) -> None:
        if self.timer is not None:
            self.late = max(0.0, self.loop.time() - self.timer.when())
            self.timer.cancel()
            self.timer = None
        if self.listener >= 0:
            self.loop.add_reader(self.listener, self.on_asked)

    def on_asked(self) -> None:
        if not any(event & select.POLLIN for _, event in self.waiting.poll(0)):  # who asked has ended, or all have
            return
        if self.left <= 0:
            self.count()
        question = bytearray(QUESTION.size)
        with suppress(OSError):  # the process that asked has been killed
            fcntl.ioctl(self.listener, RECEIVE, question)
            answer = (0, CONTINUE) if self.left > 0 else (-errno.EAGAIN, 0)
            self.left -= 1
            fcntl.ioctl(self.listener, SEND, ANSWER.pack(*QUESTION.unpack(question), *answer))
        if self.left <= 0:
            self.loop.remove_reader(self.listener)
            self.timer = self.loop.call_later(self.pause, self.listen)

    def count(self) -> None:
        started = time.monotonic()
        self.left = self.most - tasks(self.slot)
        self.pause = max(PAUSE_SECONDS, (time.monotonic() - started + self.late) / COUNTING_SHARE)

    def close(self) -> None:
        """From now on no process of the slot can start another."""
        if self.timer is not None:
            self.timer.cancel()
        self.loop.remove_reader(self.listener)
        os.close(self.listener)
        self.listener = -1


class Shortages:
    """How often the kernel has killed a process because memory ran out, and refused one. `look` must be called
    regularly."""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self.counts = container.kills(), container.refused_processes()

    def blamed(self, response: Response, before: tuple[int, int], disk: str, *, lost: bool) -> str:
        """A sentence on the resource that ran out and may have made this program fail; empty if none did. before:
        `counts` when it began. disk: the folder on the machine's disk that the program could write to, or empty. lost:
        whether the kernel may have killed a process of this call; a program that kills itself while another one exceeds
        its limit has lost none."""
        is_killed = response.signal == "SIGKILL" and not response.kill_reason  # not by the sandbox
        if not is_killed and response.outcome not in FAILED:
            return ""
        if disk and not is_killed and container.is_full(disk, FILE_BYTES):
            return f"the disk of {disk} is full; free it, or use isolation L3"
        self.look()
        has_killed, has_refused = (now > then for now, then in zip(self.counts, before, strict=True))
        if is_killed and lost and has_killed:
            return (
                "the kernel killed it because the machine or its container was out of memory, though the program kept "
                "its limit; give the container more memory, or run fewer slots"
            )
        if not is_killed and has_refused:
            return (
                "the container has as many processes and threads as it may have; raise its limit (pids.max: Docker's "
                "--pids-limit, Kubernetes' podPidsLimit), or run fewer slots"
            )
        return ""


async def watch(workers: Callable[[], Iterable[Worker]], also: Iterable[Callable[[], None]]) -> None:
    """Until cancelled, every LOOK_SECONDS: check the calls that have run for that long, stop those that exceed a limit,
    and call each of `also`."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for look in also:
            look()
        due = time.monotonic() - LOOK_SECONDS
        for worker in workers():
            if worker.watched and worker.started < due and worker.on_exceeded is not None:
                started = worker.started
                exceeded = ""
                # In a thread: the kernel takes half a second to add up processes with very many mappings.
                with suppress(RuntimeError):  # no room for another thread now: retry at the next look
                    exceeded = await asyncio.to_thread(over, worker)
                if exceeded and worker.started == started and worker.on_exceeded is not None:
                    worker.on_exceeded(exceeded)


def over(worker: Worker) -> str:
    """The limit that this call exceeds, `processes` or `memory`, or ""."""
    if "no_process_limit" in worker.watched and tasks(worker.process) > worker.limits.processes:
        return "processes"
    family = descendants(worker.process)
    states = [numbers(pid, "status") for pid in family]
    limit = worker.limits.memory_bytes + HEADROOM_BYTES
    tables = sum(state.get("VmPTE", 0) for state in states)
    resident = tables + sum(state.get("RssAnon", 0) + state.get("RssShmem", 0) for state in states)
    if "no_memory_cgroup" not in worker.watched or resident <= limit:
        return ""  # below the limit even with shared pages counted repeatedly; the exact figure is expensive
    exact = [numbers(pid, "smaps_rollup") for pid in family]
    shares = sum(each.get("Pss_Anon", 0) + each.get("Pss_Shmem", 0) for each in exact)
    used = tables + shares if any(exact) else resident
    return "memory" if used > limit else ""


def tasks(slot: int) -> int:
    """Processes and threads below the slot."""
    return sum(numbers(pid, "status").get("Threads", 0) for pid in descendants(slot))


def can_see(pid: int) -> bool:
    """Whether this kernel lists the children of a process, which not every kernel does."""
    return os.path.exists(f"/proc/{pid}/task/{pid}/children")


def children(pid: int) -> list[int]:
    """Children of each thread of the process, oldest first. Empty when it is gone."""
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for thread in threads for child in content(pid, f"task/{thread}/children").split()]
    return []


def descendants(pid: int) -> list[int]:
    """All processes below a process, which adopts their orphans; without the process itself."""
    found = children(pid)
    for child in found:  # the list grows meanwhile
        found += children(child)
    return found


def kill_others(slot: int, kept: int) -> bool:
    """Kill all descendants of the slot but `kept`; returns whether there were none. Each is stopped first, so that it
    cannot fork. They take a moment to end, and their orphans become the slot's children: repeat the call until True."""
    others = [pid for pid in descendants(slot) if pid != kept and not is_dead(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            with suppress(OSError):
                os.kill(pid, number)
    return not others


def kill_all(slots: Iterable[int]) -> None:
    """Kill all descendants of these slots and wait until they are gone, for at most GONE_SECONDS: without a namespace
    that ends with the slot, processes forked by its program would outlive it."""
    deadline = time.monotonic() + GONE_SECONDS
    while (slots := [slot for slot in slots if not kill_others(slot, 0)]) and time.monotonic() < deadline:
        time.sleep(0.005)


def is_dead(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    return stat(pid)[:1] in ([], ["Z"], ["X"])


def cpu_seconds(pid: int, *, with_children: bool = False) -> float:
    """CPU of a process with all its threads, and of the children that it has waited for; 0 when it is gone."""
    try:
        own = time.clock_gettime(~pid << 3 | 2) if pid else 0.0
    except OSError:
        return 0.0
    return own + (sum(map(int, stat(pid)[13:15])) / TICKS if with_children else 0.0)


def waited(pid: int) -> float:
    """Seconds that the process's main thread has waited for a CPU; 0 when it is gone."""
    return sum(map(int, content(pid, "schedstat").split()[1:2])) / 1e9


def waits(worker: Worker, before: Mapping[int, float]) -> tuple[float, float]:
    """(the longest wait of one of the program's processes for a CPU, CPU of all together), seconds so far. before: what
    each process of earlier cells had waited when this one began, zombies among them."""
    family = descendants(worker.process)
    cpu = sum(cpu_seconds(pid, with_children=True) for pid in (worker.process, *family)) - worker.cpu_seconds
    return max((waited(pid) - before.get(pid, 0.0) for pid in family), default=0.0), cpu


def is_starved(waited: float, cpu: float, wall_seconds: float, fair_share: float) -> bool:
    """Whether a process has waited for more than a second and half of the time, while the slot received less than a
    quarter of its share: then other load kept the program from ending."""
    return waited > max(STARVED_SECONDS, 0.5 * wall_seconds) and cpu < 0.25 * fair_share * wall_seconds


def stat(pid: int) -> list[str]:
    """Fields of the process's stat file, from the state on; empty when it is gone."""
    return content(pid, "stat").rpartition(") ")[2].split()


def numbers(pid: int, name: str) -> dict[str, int]:
    """The numbers in a file of lines like `Name: 12 kB`, kB as bytes; empty when the process is gone."""
    lines = [line.replace(":", " ").split() for line in content(pid, name).split("\n")]
    pairs = [
        (line[0], int(line[1]) * (1024 if line[2:] == ["kB"] else 1))
        for line in lines
        if line[1:2] and line[1].isdigit()
    ]
    return dict(pairs)


def content(pid: int, name: str) -> str:
    """Content of a file of the process; empty when it is gone. Some files contain the process's name, which it chooses:
    any bytes but a newline. Read as ASCII, a name contains only digits that `int` reads, and no line end."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace", newline="\n") as file:
            return file.read()
    except OSError:
        return ""
