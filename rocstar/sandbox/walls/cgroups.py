"""Control groups: memory and number of processes of a whole call, counted by the kernel, and its fair share of CPU.

Each slot has a group that it lives in with all its programs, so a call costs nothing: the daemon writes a limit only
when it differs from the last call's, and reads after the call whether the kernel had to kill for want of memory. All
slots weigh the same, however many processes compute in one; together they weigh as much as one process a core. Used
where a folder for groups can be made below the one this process is in: version 1, or version 2 where it was delegated
to us. Not here: what to do where there are no groups (`daemon.watch`).
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
HEADROOM_BYTES = 128 * 2**20  # files in the working directory are memory too (64 MiB), and so is what the slot holds
GONE_SECONDS = 2.0  # killed processes leave their group in milliseconds
EVENTS_BYTES = 512
CONTROLLERS = frozenset({"memory", "pids", "cpu"})
WEIGHTS = {1: ("cpu.shares", 1024, 2**18), 2: ("cpu.weight", 100, 10_000)}
"""By version: file, weight of one ordinary process, greatest weight."""


class Tree(NamedTuple):
    """A hierarchy of groups, and where in it we may make our own."""

    version: int
    controllers: frozenset[str]
    """Of CONTROLLERS, those that may be there."""
    folder: Path
    """The group that ours are made below."""


class ControlGroup:
    """The group of one slot and all its programs; the keeper stays outside and is not killed for their memory.
    Raises OSError when a file of it cannot be opened or written."""

    def __init__(self, folders: Mapping[str, Path], versions: Mapping[str, int]) -> None:
        """`folders`, `versions`: by controller."""
        self.folders = folders
        self._limits: dict[str, int] = {}
        self._files: dict[str, int] = {}
        if "memory" in folders:
            is_first = versions["memory"] == 1
            self._open("memory", "memory.limit_in_bytes" if is_first else "memory.max", os.O_WRONLY)
            self._open("kills", "memory.oom_control" if is_first else "memory.events", os.O_RDONLY)
            if is_first:
                self._open("full", "memory.failcnt", os.O_RDONLY)
            with suppress(OSError):  # not every kernel swaps
                (folders["memory"] / ("memory.swappiness" if is_first else "memory.swap.max")).write_text("0")
        if "pids" in folders:
            self._open("pids", "pids.max", os.O_WRONLY)
        self._counts = self._count()
        self.lost = "memory" not in folders
        """Whether the kernel had killed a process of this group, for whatever group's sake, when `killed` last looked;
        True where nobody counts."""

    def _open(self, what: str, name: str, flags: int) -> None:
        folder = self.folders["pids" if what == "pids" else "memory"]
        self._files[what] = os.open(folder / name, flags | os.O_CLOEXEC)

    def join(self, process: int) -> None:
        """Put a process in, and all that it will start."""
        for folder in {*self.folders.values()}:
            (folder / "cgroup.procs").write_text(f"{process}")

    def limit(self, memory_bytes: int, processes: int) -> None:
        """From now on, for all of the group together."""
        for what, number in (("memory", memory_bytes), ("pids", processes)):
            if what in self._files and self._limits.get(what) != number:
                os.pwrite(self._files[what], b"%d" % number, 0)
                self._limits[what] = number

    def killed(self) -> bool:
        """Whether the kernel has killed in this group since the last time because the group itself was full: not where
        one above it was, the container's say, or the machine."""
        before, self._counts = self._counts, self._count()
        has_killed, was_full = (now > then for then, now in zip(before, self._counts, strict=True))
        self.lost = has_killed or "kills" not in self._files
        return has_killed and was_full

    def _count(self) -> tuple[int, int]:
        """Processes that were killed in this group, and how often it had reached its own limit."""
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
        """By controller: a folder of this daemon's own, locked for as long as it lives."""
        self.versions: dict[str, int] = {}
        self.locks: list[int] = []
        self.opened: dict[str, ControlGroup] = {}

    def open(self, name: str) -> ControlGroup | None:
        """The group of this name, made if need be; None where there are no groups. Raises OSError."""
        if not self.folders:
            return None
        if name not in self.opened:
            own = {controller: folder / name for controller, folder in self.folders.items()}
            for folder in own.values():
                folder.mkdir(exist_ok=True)
            self.opened[name] = ControlGroup(own, self.versions)
        return self.opened[name]

    def close(self) -> None:
        """Kill what is left in them and remove them. What cannot be removed yet, another daemon's start removes."""
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
    """The groups of a new daemon; also removes what dead daemons left. Empty where none can be made."""
    groups = Groups()
    for tree in trees(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        if tree.version == 2 and 2 in groups.versions.values():
            continue  # a process is in one group of that version only
        with suppress(OSError):
            missing = offered(tree) - groups.folders.keys()
            if missing:
                sweep(tree.folder)
            for wanted in filter(None, (missing, missing - {"cpu"})):  # a share of the CPU must not cost the other two
                with suppress(OSError):
                    folder, lock = make_folder(tree, wanted)
                    groups.locks.append(lock)
                    groups.folders |= dict.fromkeys(sorted(wanted), folder)
                    groups.versions |= dict.fromkeys(wanted, tree.version)
                    break
    return groups


def trees(own: str, mounts: str) -> Iterator[Tree]:
    """Where groups might be made. `own`: /proc/self/cgroup; `mounts`: /proc/self/mountinfo."""
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
                if os.geteuid() != 0 and below != ".":  # what an ordinary user may write was delegated to them
                    yield Tree(version=2, controllers=CONTROLLERS, folder=folder.parent)


def offered(tree: Tree) -> frozenset[str]:
    """Those of its controllers that groups there may have. Raises OSError."""
    if tree.version == 1:
        return tree.controllers
    return tree.controllers & {*(tree.folder / "cgroup.controllers").read_text().split()}


def make_folder(tree: Tree, controllers: frozenset[str]) -> tuple[Path, int]:
    """A folder of our own, and the descriptor that holds its lock. Raises OSError where these controllers cannot be
    had there."""
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
    """For the groups below this one. The kernel refuses where processes live in it."""
    control = folder / "cgroup.subtree_control"
    missing = controllers - set(control.read_text().split())
    if missing:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def sweep(folder: Path) -> None:
    """Remove what dead daemons left here or in sibling groups: a service that is started again may be in a group of
    another name. A folder is a dead daemon's if no process holds its lock."""
    for left in [*folder.glob(f"{PREFIX}*"), *folder.parent.glob(f"*/{PREFIX}*")]:
        lock = folders.try_lock(left)
        if lock is not None:
            remove(left)
            os.close(lock)


def remove(folder: Path) -> None:
    """A daemon's groups with all that still runs in them. What stays is tried again by the next sweep."""
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
