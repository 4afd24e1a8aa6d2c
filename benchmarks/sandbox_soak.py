"""Many mixed calls, a tenth of them hostile, while slots, keepers, zygotes and daemons are killed (SIGKILL). Is
every call answered once and truthfully, and is nothing left behind? Prints tables and, last, one JSON line; the exit
code is 1 when a call was lost or answered wrongly, or something is left.

Callers send one call after another. What was killed under a call is the service's fault: it runs the call again, and
says so (`internal`, or SandboxDown) when that fails too; such answers are counted apart, they are no lost calls. This
process adopts what loses its parent, so a process that leaks is seen for certain.

    nice -n 5 python benchmarks/sandbox_soak.py [--calls 200000] [--minutes 60] [--daemons 2] [--slots 2] [--calm]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from frame import parser, print_figures, print_rows, report
from hostile_programs import Task, task

from rocstar.sandbox.call import Response, SandboxDown, ServiceOutcome
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.client.node import ChildConnection

PRELOAD = ("numpy", "sympy")
CALLERS = 32
LOST_SECONDS = 300.0  # a call that takes so long will not come back
CANCELLED_SHARE = 0.005  # of calls whose caller goes away soon after sending them
KILL_SECONDS = {"slot": 0.7, "keeper": 3.0, "zygote": 20.0, "daemon": 40.0}  # mean time between two
SAMPLE_SECONDS = 2.0
KINDS = ("daemon", "zygote", "keeper", "slot", "program", "dead", "other")
PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    own_bytes: int
    """Resident set of this process: callers and client."""
    daemon_bytes: int
    """Of the daemons, all together."""
    zygote_bytes: int
    own_fds: int
    daemon_fds: int
    """Of the daemons, most of one."""
    processes: int
    """All of ours."""


@dataclass(slots=True)
class Tally:
    """What became of the calls."""

    sent: int = 0
    right: int = 0
    hostile: int = 0
    retried: int = 0
    """Right, in a second or later attempt."""
    cancelled: int = 0
    """By their callers, us."""
    internal: int = 0
    """Answered: the service failed."""
    down: int = 0
    """Same, as SandboxDown."""
    lost: int = 0
    """Never answered."""
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """Messages of internal and down."""
    killed: Counter[str] = field(default_factory=Counter)

    def answered(self) -> int:
        return self.right + self.cancelled + self.internal + self.down + len(self.wrong)


async def caller(client: SandboxClient, numbers: Iterator[int], tally: Tally, options: argparse.Namespace) -> None:
    """One call after another, until there are no more numbers."""
    level = client.info().isolation
    for number in numbers:
        if time.monotonic() > options.deadline:
            return
        each = task(number, options.seed)
        tally.sent += 1
        tally.hostile += each.hostile
        try:
            with_end = asyncio.wait_for(answer(client, each), LOST_SECONDS)
            judge(await with_end, each, level, tally)
        except TimeoutError:
            tally.lost += 1
        except SandboxDown as error:
            tally.down += 1
            tally.faults[f"SandboxDown: {error}"] += 1


async def answer(client: SandboxClient, each: Task) -> Response | None:
    """None for a call that its caller gave up."""
    call = asyncio.ensure_future(client.run(each.call))
    rng = random.Random(each.call.id)
    if rng.random() >= CANCELLED_SHARE:
        return await call
    await asyncio.sleep(rng.random() * 0.05)
    call.cancel()
    with suppress(asyncio.CancelledError):
        return await call
    return None


def judge(response: Response | None, each: Task, level: str, tally: Tally) -> None:
    if response is None:
        tally.cancelled += 1
    elif isinstance(response.outcome, ServiceOutcome):
        tally.internal += 1
        tally.faults[f"{response.outcome}: {response.message}"] += 1
    elif response.id == each.call.id and each.passes(response, level):
        tally.right += 1
        tally.retried += response.attempt > 1
    else:
        seen = f"{response.outcome} {response.signal or ''} attempt {response.attempt} {response.stdout[-80:]!r}"
        tally.wrong.append(f"call {each.call.id} ({each.kind}): {seen} {response.stderr[-80:]!r}")


async def killer(tally: Tally, rng: random.Random) -> None:
    """Kills forever, each kind at its own rate."""
    due = {kind: time.monotonic() + seconds * rng.random() for kind, seconds in KILL_SECONDS.items()}
    while True:
        kind = min(due, key=lambda kind: due[kind])
        await asyncio.sleep(max(0.0, due[kind] - time.monotonic()))
        due[kind] = time.monotonic() + rng.expovariate(1 / KILL_SECONDS[kind])
        if victims := ours()[kind]:
            with suppress(psutil.Error):
                rng.choice(victims).kill()
                tally.killed[kind] += 1


async def sampler(samples: list[Sample], client: SandboxClient) -> None:
    """Looks at memory and descriptors forever, and reaps what we adopted."""
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        found = ours()
        reap(found["dead"], started(client))
        with suppress(psutil.Error):
            samples.append(sample(found))


def started(client: SandboxClient) -> list[int]:
    """Process ids that the client itself waits for."""
    connections = [node.connection for node in client.nodes]
    return [each.process.pid for each in connections if isinstance(each, ChildConnection)]


async def soak(client: SandboxClient, tally: Tally, options: argparse.Namespace) -> list[Sample]:
    samples: list[Sample] = []
    around = [asyncio.create_task(sampler(samples, client))]
    if not options.calm:
        around.append(asyncio.create_task(killer(tally, random.Random(options.seed))))
    numbers = iter(range(1, options.calls + 1))
    await asyncio.gather(*(caller(client, numbers, tally, options) for _ in range(CALLERS)))
    for job in around:
        job.cancel()
    await asyncio.gather(*around, return_exceptions=True)
    return samples


# -- processes, seen from outside


def ours() -> dict[str, list[psutil.Process]]:
    """All processes below this one, by what they are."""
    found: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    depth: dict[int, int] = {}  # below the zygote, by process id
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            parent, command = process.ppid(), " ".join(process.cmdline())
            below = depth.get(parent)
            kind = "other"
            if process.status() == psutil.STATUS_ZOMBIE:
                kind = "dead"
            elif below is not None:
                kind = ("keeper", "slot", "program")[min(below, 2)]
                depth[process.pid] = below + 1
            elif "sandbox.daemon.main" in command:
                kind = "daemon"
            elif "sandbox.slot.zygote" in command and parent != os.getpid():
                kind, depth[process.pid] = "zygote", 0
            found[kind].append(process)
    return found


def reap(dead: Sequence[psutil.Process], awaited: Sequence[int]) -> None:
    """Those we adopted; awaited: process ids whose ends somebody else waits for."""
    for process in dead:
        with suppress(psutil.Error, ChildProcessError):
            if process.pid not in awaited and process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)


def sample(found: Mapping[str, Sequence[psutil.Process]]) -> Sample:
    me, daemons = psutil.Process(), found["daemon"]
    return Sample(
        own_bytes=me.memory_info().rss,
        daemon_bytes=sum(daemon.memory_info().rss for daemon in daemons),
        zygote_bytes=sum(zygote.memory_info().rss for zygote in found["zygote"]),
        own_fds=me.num_fds(),
        daemon_fds=max((daemon.num_fds() for daemon in daemons), default=0),
        processes=sum(map(len, found.values())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What can be left behind."""

    processes: tuple[str, ...]
    """Below this one."""
    descriptors: int
    """Of this process."""
    mounts: frozenset[str]
    files: tuple[str, ...]
    """In the folder for temporary files, which is ours alone."""


def look(folder: str) -> Traces:
    alive = [process for kind, found in ours().items() if kind != "dead" for process in found]
    return Traces(
        processes=tuple(map(str, alive)),
        descriptors=psutil.Process().num_fds(),
        mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
        files=tuple(sorted(str(path) for path in Path(folder).rglob("*"))),
    )


def left(before: Traces, folder: str) -> dict[str, list[str]]:
    """What is there now and was not before; processes get a moment to end."""
    for _ in range(100):
        after = look(folder)
        if not after.processes:
            break
        time.sleep(0.1)
    more = after.descriptors - before.descriptors
    return {
        "processes": list(after.processes),
        "descriptors": [f"{more} more"] if more > 0 else [],
        "mounts": sorted(after.mounts - before.mounts),
        "files": sorted(set(after.files) - set(before.files)),
    }


def quarters(samples: Sequence[Sample]) -> list[dict[str, float | str]]:
    """Medians of the first and the last quarter, the first few samples left out: the service was still coming up."""
    samples = samples[5:]
    size = max(1, len(samples) // 4)
    rows: list[dict[str, float | str]] = []
    for name in Sample.__slots__ if samples else ():
        scale = 2**20 if name.endswith("bytes") else 1
        values = [getattr(each, name) / scale for each in samples]
        first, last = statistics.median(values[:size]), statistics.median(values[-size:])
        unit = name.replace("bytes", "MiB")
        rows.append({"what": unit, "first": round(first, 1), "last": round(last, 1), "most": round(max(values), 1)})
    return rows


# -- what is printed


def told(
    tally: Tally, samples: Sequence[Sample], remains: Mapping[str, list[str]], seconds: float
) -> dict[str, object]:
    """The figures, printed."""
    counts = {name: value for name in Tally.__slots__ if isinstance(value := getattr(tally, name), int)}
    counts |= {"wrong": len(tally.wrong), "calls_per_second": round(tally.sent / seconds, 1)}
    print_figures({**counts, "killed": tally.killed})
    for text in (*tally.wrong[:20], *(f"{count} x {fault}" for fault, count in tally.faults.most_common(10))):
        print(text)
    memory = quarters(samples)
    if memory:
        print_rows(memory)
    for what, names in remains.items():
        print(f"left {what}: {len(names)}", *names[:5], sep="\n  ")
    left_behind = {what: len(names) for what, names in remains.items()}
    return {**counts, "seconds": round(seconds, 1), "killed": tally.killed, "memory": memory, "left": left_behind}


def options() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=200_000)
    arguments.add_argument("--minutes", type=float, default=600.0, help="send no more calls after so long")
    arguments.add_argument("--daemons", type=int, default=2)
    arguments.add_argument("--slots", type=int, default=2, help="of each daemon")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--calm", action="store_true", help="kill nothing: daemons live on, to see their memory")
    return arguments.parse_args()


def main() -> None:
    asked = options()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this process could not become a subreaper, so it would not see processes that leak; use Linux 3.4+")
    with tempfile.TemporaryDirectory(prefix="sandbox-soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        asyncio.run(asyncio.sleep(0))  # what asyncio opens once is not ours
        before, tally = look(folder), Tally()
        with SandboxClient.start(slots=asked.slots, daemons=asked.daemons, preload=PRELOAD) as client:
            level, began = client.info().isolation, time.monotonic()
            asked.deadline = began + 60 * asked.minutes
            samples = asyncio.run(soak(client, tally, asked))
            seconds = time.monotonic() - began
        remains = left(before, folder)
    figures = told(tally, samples, remains, seconds)
    report(isolation=level, daemons=asked.daemons, slots=asked.slots, **figures)
    unanswered = tally.sent - tally.answered()
    sys.exit(1 if unanswered or tally.wrong or any(remains.values()) else 0)


if __name__ == "__main__":
    main()
