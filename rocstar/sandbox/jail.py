"""The walls around a slot, built once when it starts and inherited by every program it forks.

Covered, by plan: see `PLANS` and docs/sandbox.md. A plan either stands or raises OSError; nothing is assumed.
Not covered: kernel exploits, side channels, memory of a whole call (limits are per process).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rocstar.sandbox import landlock, linux, rootfs, seccomp

NAMESPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
FIRST_USER = 0x70000000  # far above what people and services use; two hosts never share one (see `slot_user`)
SLOTS_PER_HOST = 64
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
PLANS = (ROOT, USER, CONFINED, PROCESS)  # strongest first


@dataclass(slots=True)
class Jail:
    """What a slot has to know about the walls it stands in."""

    counts_processes: bool
    """RLIMIT_NPROC counts this slot's processes and no others."""
    private_processes: bool
    """In a pid namespace of its own."""
    workdir: str
    clean_inodes: int | None
    """Files in use on the working directory's own file system when it is empty; None where it has none."""
    mode: int
    failed: tuple[str, ...] = ()
    """Properties this plan should give and could not."""

    def kill_all(self, pid: int) -> None:
        """Kill the program and everything it started."""
        if self.private_processes:
            kill_quietly(-1)
        else:
            kill_family(pid)

    def clean(self) -> None:
        """Empty the working directory. Raises OSError when that fails: the slot must not go on."""
        if os.stat(self.workdir).st_mode != self.mode:
            os.chmod(self.workdir, self.mode & 0o7777)
        if self.clean_inodes is not None and rootfs.inodes_in_use(self.workdir) == self.clean_inodes:
            return
        rootfs.empty(self.workdir)
        if self.clean_inodes is not None and rootfs.inodes_in_use(self.workdir) != self.clean_inodes:
            raise OSError(f"something in {self.workdir} could not be removed")


def kill_quietly(pid: int) -> None:
    with suppress(ProcessLookupError):  # gone already
        os.kill(pid, signal.SIGKILL)


def kill_family(pid: int) -> None:
    """Without a pid namespace: the program, its group, and what came to the slot (their subreaper) as orphans."""
    with suppress(ProcessLookupError):  # gone, or it has not made its group yet
        os.killpg(pid, signal.SIGKILL)
    for child in children():
        kill_quietly(child)


def children() -> list[int]:
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def slot_user(number: int) -> int:
    """A user id that no other slot on this machine runs under."""
    return FIRST_USER + (os.getppid() % 2**22) * SLOTS_PER_HOST + number % SLOTS_PER_HOST


def start(plan: Plan, number: int, workdir: str, channel: socket.socket, serve: Callable[[Jail], None]) -> None:
    """In a fresh fork: become a slot behind this plan's walls and serve. Raises OSError where it cannot be built."""
    linux.die_with_parent(signal.SIGKILL)
    user = slot_user(number)
    if not plan.namespaces:
        serve(enter_process(plan, user, workdir))
        return
    outside = os.geteuid(), os.getegid()
    linux.unshare(plan.namespaces)
    if plan.namespaces & linux.CLONE_NEWUSER:
        map_user(*outside)
        linux.die_with_parent(signal.SIGKILL)
    pid = os.fork()  # the first process of the pid namespace; its end ends every other in there
    if pid:
        channel.close()
        os.waitpid(pid, 0)
        return
    serve(enter_namespaces(plan, user))


def map_user(user: int, group: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_USER} {user} 1"),
        ("gid_map", f"{INSIDE_USER} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_namespaces(plan: Plan, user: int) -> Jail:
    os.setsid()
    socket.sethostname("sandbox")
    rootfs.build()
    clean_inodes = rootfs.inodes_in_use(rootfs.WORKDIR)
    linux.drop_bounding_set()
    if plan.needs_root:
        become(user)
    failed = confine(local_sockets=True, signals=True)
    linux.die_with_parent(signal.SIGKILL)
    os.chdir(rootfs.WORKDIR)
    mode = os.stat(rootfs.WORKDIR).st_mode
    return Jail(True, True, rootfs.WORKDIR, clean_inodes, mode, ("no_memory_cgroup", *failed))


def enter_process(plan: Plan, user: int, workdir: str) -> Jail:
    os.setsid()
    os.makedirs(workdir, 0o700, exist_ok=True)
    rootfs.empty(workdir)  # a predecessor that was killed may have left something
    is_root = os.geteuid() == 0
    linux.drop_bounding_set()
    if is_root:
        os.chown(workdir, user, user)
        become(user)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")
    os.chdir(workdir)
    os.environ["HOME"] = os.environ["TMPDIR"] = workdir
    signals_scoped = plan is CONFINED and landlock.confine(rootfs.sources(), workdir)
    failed = confine(local_sockets=False, signals=signals_scoped or plan is PROCESS)
    if plan is CONFINED and failed:
        raise OSError("the system-call filter could not be loaded")
    linux.die_with_parent(signal.SIGKILL)
    missing = ("no_memory_cgroup", "no_disk_quota", *failed, *(() if is_root else ("no_process_limit",)))
    return Jail(is_root, False, workdir, None, os.stat(workdir).st_mode, missing)


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def confine(*, local_sockets: bool, signals: bool) -> tuple[str, ...]:
    """The parts all plans share; what could not be had."""
    linux.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    try:
        seccomp.install(local_sockets=local_sockets, signals=signals)
    except (OSError, KeyError):
        return ("no_seccomp",)
    return ()
