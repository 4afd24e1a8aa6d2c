"""What the container, the job or the machine of this process permits: its share of the CPU, its memory and open files,
and how often the kernel refused or killed processes there. Read from the control groups of this process, versions 1
and 2, and from /proc; a missing file means no such limit. Not here: our own groups (`walls.cgroups`)."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMINFO, VMSTAT = Path("/proc/meminfo"), Path("/proc/vmstat")
MEMORY_FILES = (  # limit, use, and prefix of the pages of files in memory.stat; version 2, then version 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def cpus() -> float:
    """Logical CPUs that this process may keep busy: those that it may run on, bounded by the quotas of its control
    groups. At least a hundredth, the least that the kernel grants."""
    return min([float(len(os.sched_getaffinity(0))), *cpu_shares()])


def open_files() -> int:
    """How many this process may have: its hard limit, to which it is raised here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def cpu_shares(root: Path = GROUPS, own: Path = OWN) -> Iterator[float]:
    """CPUs that each control group of this process grants, its own first."""
    for folder in folders("cpu", root, own):
        first = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota, _, period = (_read(folder / "cpu.max") or first).partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def memory_limit(root: Path = GROUPS, own: Path = OWN) -> int | None:
    """Bytes that this process and all others of its control groups may have in memory together; None without limit."""
    return min((limit for limit, _ in _memory(root, own)), default=None)


def host_bytes(root: Path = GROUPS, own: Path = OWN) -> int:
    """Bytes of main memory that this process can still take. The kernel frees its page cache on demand, so cached
    files are not counted as used: a container that has read a large file is not full."""
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min([available, *(max(0, limit - used) for limit, used in _memory(root, own))])


def _memory(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used without cached files) of each control group with a limit."""
    for folder in folders("memory", root, own):
        for limit, current, prefix in MEMORY_FILES:
            most, used = _read(folder / limit), _read(folder / current)
            if most.isdecimal() and used.isdecimal() and int(most) < 2**62:  # version 1: a huge number is no limit
                stat = _counts(_read(folder / "memory.stat"))
                files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                yield int(most), max(0, int(used) - files)


def is_full(folder: str, least_bytes: int) -> bool:
    """Whether the folder's disk has less room than this."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        no_room = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < least_bytes  # some report 0 blocks
        return no_room or (disk.f_files > 0 and not disk.f_favail)
    return False


def kills(vmstat: Path = VMSTAT) -> int:
    """Processes that the kernel's OOM killer has killed on the machine, in any container, since it started; 0 if the
    kernel does not report it."""
    return _counts(_read(vmstat)).get("oom_kill", 0)


def refused_processes(root: Path = GROUPS, own: Path = OWN) -> int:
    """How often the kernel refused a process or thread because a control group of this process was at its limit.
    Newer kernels count refusals by groups below in `pids.events` too, but not in `pids.events.local`."""
    count = 0
    for folder in folders("pids", root, own):
        text = _read(folder / "pids.events.local") or _read(folder / "pids.events")
        count += _counts(text).get("max", 0)
    return count


def folders(controller: str, root: Path = GROUPS, own: Path = OWN) -> Iterator[Path]:
    """This process's control groups of a controller, innermost first. Some may not exist: a container may see its own
    group as the root."""
    lines = (line.split(":", 2) for line in _read(own).splitlines())
    for _, controllers, path in (fields for fields in lines if len(fields) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _counts(text: str) -> dict[str, int]:
    """Lines of a name and a number; others are skipped, because an emulated kernel may write what it likes."""
    pairs = (line.split(" ") for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
