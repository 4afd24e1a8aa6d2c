"""The walls around a slot, built once when it starts and inherited by every program it forks.

Covered, by plan: see `PLANS` and docs/sandbox.md. A plan either stands or raises OSError; nothing is assumed.
Not covered: kernel exploits, side channels. Memory of a whole call is counted by its group (`groups`), if it has one.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from rocstar.sandbox import landlock, linux, rootfs, seccomp
from rocstar.sandbox.membership import Membership, Shield

NAMESPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
FIRST_USER = 0x70000000  # far above what people and services use; two nurseries never share one (see `slot_user`)
SLOTS_PER_NURSERY = 256
INSIDE_USER = 1000
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # one BLAS thread: others would count against the limit on processes
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to isolate a slot."""

    name: str
    level: str
    """L1, L2 or L3."""
    namespaces: int
    """Flags for unshare; 0 for none."""
    needs_root: bool = False


ROOT = Plan("root", "L3", NAMESPACES, needs_root=True)
USER = Plan("user", "L3", NAMESPACES | linux.CLONE_NEWUSER)
CONFINED = Plan("confined", "L2", 0)
PROCESS = Plan("process", "L1", 0)
OPEN = Plan("open", "L0", 0)  # no walls at all, to measure what they cost; had only by asking for L0
PLANS = (ROOT, USER, CONFINED, PROCESS, OPEN)  # strongest first


class Signals(IntEnum):
    CONTAINED = 1  # by the pid namespace, whose first process is immune
    SCOPED = 2  # to its own children, by Landlock
    DENIED = 3  # altogether, by a system-call filter
    FREE = 4


class Inside(NamedTuple):
    """What a program's process has to know about the walls. Plain values: it is marshalled."""

    processes_beside: int | None
    """Processes under the slot's user that are none of a program's; None where others share it, so that RLIMIT_NPROC
    cannot be used."""
    private_processes: bool
    """In a pid namespace of its own."""
    signals: int
    """A Signals: how programs are kept from signalling the slot, which runs under the same user."""
    home: str
    """The working directory where it is not the usual one, else empty."""

    def enter_call(self) -> None:
        """In the forked child, before the program."""
        if self.home:
            os.environ["HOME"] = os.environ["TMPDIR"] = self.home
        if self.signals == Signals.SCOPED:
            landlock.scope_signals()
        elif self.signals == Signals.DENIED:
            seccomp.install(seccomp.build_without_signals(linux.machine()))


@dataclass(slots=True)
class Jail:
    """What a slot has to know about the walls it stands in."""

    inside: Inside
    may_age: bool
    """Whether the slot may lower the priority of its programs: no other process can be meant by mistake."""
    clean_inodes: int | None
    """Files in use on the working directory's own file system when it is empty; None where it has none."""
    mode: int
    failed: tuple[str, ...] = ()
    """Properties this plan should give and could not."""
    children: int = -1
    """See `open_children`."""
    max_pid: int = 2**22
    """The highest number a process can have."""
    maps: int = -1
    """Descriptor of the list of this process's mappings, opened while /proc can still be read; -1 without."""
    shield: Shield = field(default_factory=Shield)
    groups: tuple[str, ...] = ()
    """What is counted for the slot and all its programs together: `memory`, `pids`."""

    def kill_all(self, pid: int) -> None:
        """Kill the program and everything it started."""
        if self.inside.private_processes:
            kill_quietly(-1)
        else:
            kill_family(pid, self.children)

    def clean(self) -> None:
        """Empty the working directory, in which the slot stands. Raises OSError when that fails: the slot must not go
        on."""
        if os.stat(".").st_mode != self.mode:
            os.chmod(".", self.mode & 0o7777)
        if self.clean_inodes is not None and rootfs.inodes_in_use(".") == self.clean_inodes:
            return
        rootfs.empty(".")
        if self.clean_inodes is not None and rootfs.inodes_in_use(".") != self.clean_inodes:
            raise OSError("something in the working directory could not be removed")


def kill_quietly(pid: int) -> None:
    with suppress(ProcessLookupError):  # gone already
        os.kill(pid, signal.SIGKILL)


def kill_family(pid: int, children: int) -> None:
    """Without a pid namespace: the program, its group, and what came to the slot (their subreaper) as orphans."""
    with suppress(ProcessLookupError):  # gone, or it has not made its group yet
        os.killpg(pid, signal.SIGKILL)
    kill_children(children)


def kill_children(children: int, keep: Container[int] = ()) -> bool:
    """Kill this process's children but for `keep`; whether there were any. Orphans of theirs may follow.

    `children`: a descriptor from `open_children`. They are all stopped first: a stopped process cannot fork on."""
    if children < 0:
        return False
    os.lseek(children, 0, os.SEEK_SET)
    strangers = [pid for pid in map(int, os.read(children, 65536).split()) if pid not in keep]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in strangers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    return bool(strangers)


def open_children() -> int:
    """A descriptor of the list of this process's children, to be opened while /proc can still be read; -1 without."""
    me = os.getpid()
    try:
        return os.open(f"/proc/{me}/task/{me}/children", os.O_RDONLY)
    except OSError:
        return -1


def open_maps() -> int:
    try:
        return os.open("/proc/self/maps", os.O_RDONLY)
    except OSError:
        return -1


def slot_user(number: int) -> int:
    """A user id that no other slot on this machine runs under."""
    return FIRST_USER + (os.getppid() % 2**22) * SLOTS_PER_NURSERY + number % SLOTS_PER_NURSERY


def start(plan: Plan, number: int, workdir: str, membership: Membership) -> Jail:
    """In a fresh fork: become a slot behind this plan's walls. Returns in the slot only, with its standard streams and
    other descriptors as they were. Raises OSError where the walls cannot be built."""
    linux.die_with_parent(signal.SIGKILL)
    user = slot_user(number)
    if plan is OPEN:
        return enter_open(workdir)
    if not plan.namespaces:
        return enter_process(plan, user, workdir, membership)
    outside = os.geteuid(), os.getegid()
    linux.unshare(plan.namespaces)
    if plan.namespaces & linux.CLONE_NEWUSER:
        linux.map_user(INSIDE_USER, *outside)
        linux.die_with_parent(signal.SIGKILL)
    pid = os.fork()  # the first process of the pid namespace; its end ends every other in there
    if pid:
        os.closerange(3, 256)
        os.waitpid(pid, 0)
        os._exit(0)
    return enter_namespaces(plan, user, outside[0], membership)


def enter_namespaces(plan: Plan, user: int, outside: int, membership: Membership) -> Jail:
    """`outside`: the user id that started the sandbox."""
    os.setpgid(0, 0)
    maps, max_pid, shield, groups = open_maps(), linux.read_max_pid(), Shield.open(), membership.join()
    socket.sethostname("sandbox")
    rootfs.build()
    clean_inodes = rootfs.inodes_in_use(rootfs.WORKDIR)
    linux.drop_bounding_set()
    if plan.needs_root:
        become(user)
    failed = confine(local_sockets=True, own_files=False, slot=os.getpid())
    linux.die_with_parent(signal.SIGKILL)
    os.chdir(rootfs.WORKDIR)
    mode = os.stat(rootfs.WORKDIR).st_mode
    beside = processes_beside(plan, outside)
    missing = (*uncounted(groups, limited=beside is not None), *failed)
    inside = Inside(beside, True, int(Signals.CONTAINED), "")
    return Jail(inside, True, clean_inodes, mode, missing, max_pid=max_pid, maps=maps, shield=shield, groups=groups)


def uncounted(groups: tuple[str, ...], *, limited: bool) -> list[str]:
    """`limited`: RLIMIT_NPROC counts the processes of programs, and no others but those known."""
    missing = [] if "memory" in groups else ["no_memory_cgroup"]
    return missing + ([] if limited or "pids" in groups else ["no_process_limit"])


def processes_beside(plan: Plan, outside: int) -> int | None:
    """See Jail. In a user namespace the guardian counts as well, and root outside is never limited."""
    if plan.needs_root:
        return 1
    return 2 if outside != 0 and counts_processes_by_namespace() else None


def counts_processes_by_namespace() -> bool:
    """Before Linux 5.14, RLIMIT_NPROC counted all processes of the outside user, whatever the user namespace."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor)) >= (5, 14)


def enter_process(plan: Plan, user: int, workdir: str, membership: Membership) -> Jail:
    os.setpgid(0, 0)
    shield = Shield.open()
    os.makedirs(os.path.dirname(workdir), 0o711, exist_ok=True)  # slots may pass through it, not list it
    os.makedirs(workdir, 0o700, exist_ok=True)
    rootfs.empty(workdir)  # a predecessor that was killed may have left something
    is_root = os.geteuid() == 0
    apart = is_root and rootfs.readable_by_all()
    if is_root and not apart and plan is PROCESS:
        raise OSError("programs would run as root, because no other user can read the interpreter where it lies")
    linux.drop_bounding_set()
    if apart:
        os.chown(workdir, user, user)
        become(user)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")
    os.chdir(workdir)
    children, maps, max_pid = open_children(), open_maps(), linux.read_max_pid()
    groups = membership.join() if apart or plan is CONFINED else ()  # else a program could change its group's limits
    scoped = plan is CONFINED and landlock.confine(rootfs.sources(), workdir)
    failed = confine(local_sockets=False, own_files=not apart, slot=os.getpid() if apart else None)
    signals = Signals.SCOPED if scoped else Signals.FREE if failed else Signals.DENIED
    if plan is CONFINED and failed:
        raise OSError("the system-call filter could not be loaded")
    linux.die_with_parent(signal.SIGKILL)
    missing = [*uncounted(groups, limited=apart), "no_disk_quota", *failed]
    missing += [] if apart else ["same_user"]
    missing += [] if children >= 0 else ["orphans_survive"]
    inside = Inside(1 if apart else None, False, int(signals), workdir)
    mode = os.stat(workdir).st_mode
    return Jail(inside, apart, None, mode, tuple(missing), children, max_pid, maps, shield, groups)


def enter_open(workdir: str) -> Jail:
    os.setpgid(0, 0)
    os.makedirs(workdir, 0o700, exist_ok=True)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")
    os.chdir(workdir)
    inside = Inside(None, False, int(Signals.FREE), "")
    return Jail(inside, False, None, os.stat(workdir).st_mode, ("no_walls",), open_children(), maps=open_maps())


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def confine(*, local_sockets: bool, own_files: bool, slot: int | None) -> tuple[str, ...]:
    """The parts all plans share; what could not be had. Arguments are those of `seccomp.build`."""
    linux.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        rules = seccomp.build(linux.machine(), local_sockets=local_sockets, own_files=own_files, slot=slot)
        seccomp.install(rules)
    except (OSError, KeyError):
        return ("no_seccomp",)
    return ()
