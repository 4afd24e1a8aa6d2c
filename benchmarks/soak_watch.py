"""What `sandbox_soak` sees of its processes from outside: which there are, what they hold, what they leave behind."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

KINDS = ("daemon", "zygote", "keeper", "slot", "program", "dead", "other")


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
