"""Control groups: memory and number of processes of a whole call, counted by the kernel.

Each slot has a group that it lives in with all its programs, so a call costs nothing: the host writes a limit only when
it differs from the last call's, and reads after the call whether the kernel had to kill for want of memory. Used where
a folder for groups can be made below the one this process is in: version 1, or version 2 where it was delegated to us.
Not here: keeping the slot itself from being killed (`jail.Shield`), what to do where there are no groups (`watch`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rocstar.sandbox import stale

PREFIX = "rocstar-sandbox-"
HEADROOM_BYTES = 128 * 2**20  # files in the working directory are memory too (64 MiB), and so is what the slot holds
GONE_SECONDS = 2.0  # killed processes leave their group in milliseconds
KILLS = b"oom_kill "
KILLS_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A hierarchy of groups, and where in it we may make our own."""

    version: int
    controllers: frozenset[str]
    """`memory`, `pids`, or both."""
    folder: Path
    """The group that ours are made below."""


class Group:
    """The group of one slot. Raises OSError when a file of it cannot be opened or written."""

    def __init__(self, folders: Mapping[str, Path], versions: Mapping[str, int]) -> None:
        """`folders`, `versions`: by controller."""
        self.folders = folders
        self.procs = tuple(dict.fromkeys(f"{folder}/cgroup.procs" for folder in folders.values()))
        self.controllers = tuple(folders)
        self._limits: dict[str, int] = {}
        self._files: dict[str, int] = {}
        if "memory" in folders:
            first = versions["memory"] == 1
            self._open("memory", "memory.limit_in_bytes" if first else "memory.max", os.O_WRONLY)
            self._open("kills", "memory.oom_control" if first else "memory.events", os.O_RDONLY)
            self._open("usage", "memory.usage_in_bytes" if first else "memory.current", os.O_RDONLY)
            with suppress(OSError):  # not every kernel swaps
                (folders["memory"] / ("memory.swappiness" if first else "memory.swap.max")).write_text("0")
        if "pids" in folders:
            self._open("pids", "pids.max", os.O_WRONLY)
        self._kills = self._count_kills()

    def _open(self, what: str, name: str, flags: int) -> None:
        folder = self.folders["pids" if what == "pids" else "memory"]
        self._files[what] = os.open(folder / name, flags | os.O_CLOEXEC)

    def limit(self, memory_bytes: int, processes: int) -> None:
        """From now on, all of the group together."""
        for what, number in (("memory", memory_bytes), ("pids", processes)):
            if what in self._files and self._limits.get(what) != number:
                os.pwrite(self._files[what], b"%d" % number, 0)
                self._limits[what] = number

    def usage(self) -> int:
        """Memory in use, bytes; 0 where it is not counted."""
        return int(os.pread(self._files["usage"], 64, 0)) if "usage" in self._files else 0

    def killed(self) -> bool:
        """Whether the kernel has killed in this group, for want of memory, since the last time."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills > before

    def _count_kills(self) -> int:
        if "kills" not in self._files:
            return 0
        text = b"\n" + os.pread(self._files["kills"], KILLS_BYTES, 0)
        _, found, rest = text.partition(b"\n" + KILLS)
        return int(rest.split(b"\n", 1)[0]) if found else 0

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


@dataclass(slots=True)
class Groups:
    """The groups of one host: `open` gives one by name, `close` removes them all."""

    folders: dict[str, Path] = field(default_factory=dict)
    """By controller: a folder of this host's own, locked for as long as it lives."""
    versions: dict[str, int] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)
    opened: dict[str, Group] = field(default_factory=dict)

    def open(self, name: str) -> Group | None:
        """The group of this name, made if need be; None where there are no groups."""
        if not self.folders:
            return None
        if name not in self.opened:
            own = {controller: folder / name for controller, folder in self.folders.items()}
            for folder in own.values():
                folder.mkdir(exist_ok=True)
            self.opened[name] = Group(own, self.versions)
        return self.opened[name]

    def close(self) -> None:
        """Kill what is left in them and remove them. What cannot be removed yet, another host's start removes."""
        for group in self.opened.values():
            group.close()
        self.opened.clear()
        for folder in set(self.folders.values()):
            remove(folder)
        for lock in self.locks:
            os.close(lock)
        self.folders.clear()
        self.locks.clear()


def found() -> Groups:
    """The groups of a new host; also removes what dead hosts left. Empty where none can be made."""
    groups = Groups()
    for tree in trees(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        wanted = tree.controllers - groups.folders.keys()
        with suppress(OSError):
            if wanted:
                sweep(tree.folder)
                folder, lock = opened_in(tree, wanted)
                groups.locks.append(lock)
                groups.folders |= dict.fromkeys(sorted(wanted), folder)
                groups.versions |= dict.fromkeys(wanted, tree.version)
    return groups


def trees(own: str, mounts: str) -> Iterator[Tree]:
    """Where groups might be made. `own`: /proc/self/cgroup; `mounts`: /proc/self/mountinfo."""
    paths = [line.split(":", 2)[1:] for line in own.splitlines()]
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split()[3:5]
        for controllers, path in paths:
            names = frozenset(controllers.split(",")) & {"memory", "pids"}
            below = os.path.relpath(path, root) if path.startswith(root) else "."
            folder = Path(point, below)
            if kind == "cgroup" and names and names & set(options.split(",")):
                yield Tree(version=1, controllers=names, folder=folder)
            elif kind == "cgroup2" and not controllers:
                both = frozenset({"memory", "pids"})
                yield Tree(version=2, controllers=both, folder=folder)
                if os.geteuid() != 0 and below != ".":  # what an ordinary user may write was delegated to them
                    yield Tree(version=2, controllers=both, folder=folder.parent)


def opened_in(tree: Tree, wanted: frozenset[str]) -> tuple[Path, int]:
    """A folder of our own, and the descriptor that holds its lock. Raises OSError where these controllers cannot be
    had there."""
    if tree.version == 2:
        enable(tree.folder, wanted)
    folder, lock = stale.made_and_locked(lambda: tree.folder / f"{PREFIX}{os.urandom(6).hex()}")
    try:
        if tree.version == 2:
            enable(folder, wanted)
    except OSError:
        os.close(lock)
        folder.rmdir()
        raise
    return folder, lock


def enable(folder: Path, wanted: frozenset[str]) -> None:
    """For the groups below this one. The kernel refuses where processes live in it."""
    control = folder / "cgroup.subtree_control"
    missing = wanted - set(control.read_text().split())
    if missing:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def sweep(folder: Path) -> None:
    """Remove what hosts that are dead left here, or beside here: a service that is started again may find itself in
    a group of another name. Nobody holds the lock of theirs."""
    for left in [*folder.glob(f"{PREFIX}*"), *folder.parent.glob(f"*/{PREFIX}*")]:
        lock = stale.locked(left)
        if lock is not None:
            remove(left)
            os.close(lock)


def remove(folder: Path) -> None:
    """A host's groups with all that still runs in them. What stays is tried again by the next sweep."""
    deadline = time.monotonic() + GONE_SECONDS
    for group in [*(path for path in folder.glob("*") if path.is_dir()), folder]:
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                kill(group)
                time.sleep(0.005)


def kill(group: Path) -> None:
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            if pid != "0":  # of a namespace we do not see into
                os.kill(int(pid), signal.SIGKILL)
