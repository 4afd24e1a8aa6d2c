"""Control groups: memory of a whole call, counted by the kernel, and its fair share of CPU.

Each slot and all its programs run in one group, so a call adds no cost: the daemon writes a limit only when it differs
from the last call's, and reads after the call whether the kernel's OOM killer has killed. All slots have the same CPU
weight, however many processes compute in one; together they weigh as much as one process per core. Used if a folder
for groups can be made below this process's own group: version 1, or version 2 if it was delegated to us. Not here: the
replacement when there are no groups (`daemon.watch`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rocstar.sandbox.walls import folders

PREFIX = "rocstar-sandbox-"
HEADROOM_BYTES = 128 * 2**20  # files in the working directory (64 MiB) and the slot's own pages count as memory too
GONE_SECONDS = 2.0  # killed processes leave their group in milliseconds
EVENTS_BYTES = 512
CONTROLLERS = frozenset({"memory", "cpu"})
WEIGHTS = {1: ("cpu.shares", 1024, 2**18), 2: ("cpu.weight", 100, 10_000)}
"""By version: file, weight of one ordinary process, greatest weight."""


class Tree(NamedTuple):
    """A hierarchy of groups, and the group in it below which we may make our own."""

    version: int
    controllers: frozenset[str]
    """Those of CONTROLLERS that may exist there."""
    folder: Path
    """The parent of our groups."""


class ControlGroup:
    """The group of one slot and all its programs; the keeper stays outside and is not killed for their memory. Without
    controllers it counts and limits nothing. Raises OSError when a file of the group cannot be opened or written."""

    def __init__(self, folders: Mapping[str, Path] = {}, versions: Mapping[str, int] = {}) -> None:
        """`folders`, `versions`: by controller."""
        self.folders = folders
        self._limit = 0
        self._files: dict[str, int] = {}
        if "memory" in folders:
            is_first = versions["memory"] == 1
            self._open("memory", "memory.limit_in_bytes" if is_first else "memory.max", os.O_WRONLY)
            self._open("kills", "memory.oom_control" if is_first else "memory.events", os.O_RDONLY)
            if is_first:
                self._open("full", "memory.failcnt", os.O_RDONLY)
            with suppress(OSError):  # not every kernel swaps
                (folders["memory"] / ("memory.swappiness" if is_first else "memory.swap.max")).write_text("0")
        self._counts = self._count()
        self.lost = "memory" not in folders
        """Whether the kernel had killed a process of this group, for whatever group's sake, when `killed` last looked;
        True where nobody counts."""

    def _open(self, key: str, name: str, flags: int) -> None:
        self._files[key] = os.open(self.folders["memory"] / name, flags | os.O_CLOEXEC)

    def join(self, process: int) -> None:
        """Move a process into the group; processes that it starts later are in it too."""
        for folder in {*self.folders.values()}:
            (folder / "cgroup.procs").write_text(f"{process}")

    def limit(self, memory_bytes: int) -> None:
        """Set the limit of the whole group from now on."""
        if "memory" in self._files and self._limit != memory_bytes:
            os.pwrite(self._files["memory"], b"%d" % memory_bytes, 0)
            self._limit = memory_bytes

    def killed(self) -> bool:
        """Whether the kernel has killed a process since the last call of this method because this group was at its own
        limit. A full parent group, such as the container's, or a full machine does not count."""
        before, self._counts = self._counts, self._count()
        has_killed, was_full = (now > then for then, now in zip(before, self._counts, strict=True))
        self.lost = has_killed or "kills" not in self._files
        return has_killed and was_full

    def _count(self) -> tuple[int, int]:
        """(processes that were killed in this group, times that the group reached its own limit)."""
        if "kills" not in self._files:
            return 0, 0
        events = dict(line.split() for line in os.pread(self._files["kills"], EVENTS_BYTES, 0).splitlines())
        full = os.pread(self._files["full"], EVENTS_BYTES, 0) if "full" in self._files else events.get(b"oom", b"0")
        return int(events.get(b"oom_kill", b"0")), int(full)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


class Groups:
    """The groups of one daemon: `open` gives one by name, `close` removes them all."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        """By controller: this daemon's own folder, locked while the daemon runs."""
        self.versions: dict[str, int] = {}
        self.locks: list[int] = []
        self.opened: dict[str, ControlGroup] = {}

    def open(self, name: str) -> ControlGroup:
        """The group of this name, made if necessary. Raises OSError."""
        if name not in self.opened:
            own = {controller: folder / name for controller, folder in self.folders.items()}
            for folder in own.values():
                folder.mkdir(exist_ok=True)
            self.opened[name] = ControlGroup(own, self.versions)
        return self.opened[name]

    def close(self) -> None:
        """Kill the remaining processes and remove the groups. The next daemon retries failed removals."""
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
    """The groups of a new daemon, empty if none can be made. Also removes the groups of dead daemons."""
    groups = Groups()
    for tree in trees(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        if tree.version == 2 and 2 in groups.versions.values():
            continue  # a process is in one group of that version only
        with suppress(OSError):
            missing = offered(tree) - groups.folders.keys()
            if missing:
                sweep(tree.folder)
            for chosen in filter(None, (missing, missing - {"cpu"})):  # without "cpu" the other may still work
                with suppress(OSError):
                    folder, lock = make_folder(tree, chosen)
                    groups.locks.append(lock)
                    groups.folders |= dict.fromkeys(sorted(chosen), folder)
                    groups.versions |= dict.fromkeys(chosen, tree.version)
                    break
    return groups


def trees(own: str, mounts: str) -> Iterator[Tree]:
    """Candidate places for groups. `own`: text of /proc/self/cgroup; `mounts`: text of /proc/self/mountinfo."""
    paths = [line.split(":", 2)[1:] for line in own.splitlines()]
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split()[3:5]
        for controllers, path in paths:
            names = frozenset(controllers.split(",")) & CONTROLLERS
            below = os.path.relpath(path, root) if path.startswith(root) else "."
            folder = Path(point, below)
            if kind == "cgroup" and names and names & set(options.split(",")):
                yield Tree(version=1, controllers=names, folder=folder)
            elif kind == "cgroup2" and not controllers:
                yield Tree(version=2, controllers=CONTROLLERS, folder=folder)
                if os.geteuid() != 0 and below != ".":  # a folder that an ordinary user may write was delegated to them
                    yield Tree(version=2, controllers=CONTROLLERS, folder=folder.parent)


def offered(tree: Tree) -> frozenset[str]:
    """The tree's controllers that groups there may use. Raises OSError."""
    if tree.version == 1:
        return tree.controllers
    return tree.controllers & {*(tree.folder / "cgroup.controllers").read_text().split()}


def make_folder(tree: Tree, controllers: frozenset[str]) -> tuple[Path, int]:
    """Our own folder, and the descriptor that holds its lock. Raises OSError if these controllers are not available
    there."""
    if tree.version == 2:
        enable(tree.folder, controllers)
    folder = tree.folder / f"{PREFIX}{os.urandom(6).hex()}"
    lock = folders.make_locked(folder)
    try:
        if tree.version == 2:
            enable(folder, controllers)
        if "cpu" in controllers:
            name, weight, most = WEIGHTS[tree.version]
            (folder / name).write_text(f"{min(weight * len(os.sched_getaffinity(0)), most)}")
    except OSError:
        os.close(lock)
        folder.rmdir()
        raise
    return folder, lock


def enable(folder: Path, controllers: frozenset[str]) -> None:
    """Enable controllers for the groups below this one. The kernel refuses if the group itself contains processes."""
    control = folder / "cgroup.subtree_control"
    missing = controllers - set(control.read_text().split())
    if missing:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def sweep(folder: Path) -> None:
    """Remove the groups of dead daemons here or in sibling groups: a restarted service may be in a group with another
    name. A folder belongs to a dead daemon if no process holds its lock."""
    for left in [*folder.glob(f"{PREFIX}*"), *folder.parent.glob(f"*/{PREFIX}*")]:
        lock = folders.try_lock(left)
        if lock is not None:
            remove(left)
            os.close(lock)


def remove(folder: Path) -> None:
    """Kill the processes in a daemon's groups and remove the groups. The next sweep retries those that remain."""
    deadline = time.monotonic() + GONE_SECONDS
    for group in [*(path for path in folder.glob("*") if path.is_dir()), folder]:
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                with suppress(OSError):
                    for pid in (group / "cgroup.procs").read_text().split():
                        if pid != "0":  # a process of a pid namespace that is invisible to us
                            os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.005)
