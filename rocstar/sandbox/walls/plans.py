"""The ways to isolate a slot, and the start of one: its keeper, and the walls that every program inherits from it.

    zygote --fork--> keeper (keeps its rights; renews the working directory) --fork--> slot (behind the walls)

Covered, by plan: see `PLANS` and docs/sandbox.md. A plan is set up as a whole or raises OSError.
Not covered: kernel exploits, side channels. A call's group (`cgroups`), if any, counts its memory as a whole.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

from rocstar.sandbox.walls import linux, rootfs, seccomp
from rocstar.sandbox.walls.folders import WorkFolder

NAMESPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
FIRST_USER = 0x70000000  # far above the user ids of people and services
INSIDE_USER = 1000
LAST_DESCRIPTOR = 256  # a zygote holds far fewer
FIRST_TO_KILL = "1000"  # when memory runs out the kernel kills programs before anything else on the machine
PID = struct.Struct("=i")
RENEWED, FAILED = b"\1", b"\0"
SHARED_COUNTS = {resource.RLIMIT_CORE: 1, resource.RLIMIT_SIGPENDING: 0, resource.RLIMIT_MSGQUEUE: 0}
"""Limits of resources that all slots of a user share: a program that exhausts one would affect others. Only real-time
signals use the queue. A core limit of 0 would not stop core files piped to a program (man 5 core), 1 does."""


class Plan(NamedTuple):
    """One way to isolate a slot."""

    name: str
    level: str
    """L1 to L3, see `call.Isolation`."""
    namespaces: int
    """Flags for unshare; 0 for none. Without a user namespace they need root."""


ROOT = Plan("root", "L3", NAMESPACES)
USER = Plan("user", "L3", NAMESPACES | linux.CLONE_NEWUSER)
CONFINED = Plan("confined", "L2", 0)
PROCESS = Plan("process", "L1", 0)
PLANS = (ROOT, USER, CONFINED, PROCESS)  # strongest first


class Inside(NamedTuple):
    """The facts about the walls that a program's process needs."""

    own_user: bool
    """The slot's user has no other processes than the slot and its program's."""
    private_processes: bool
    """The slot has its own pid namespace."""
    confine_signals: Callable[[], None] | None = None
    """Keeps a program from signalling processes of others if no pid namespace does. To be called in the forked child.
    Raises OSError."""


class Walls(NamedTuple):
    """The facts about its walls that a slot needs."""

    process: int
    """Process id of the slot in the daemon's pid namespace."""
    keeper: int
    """Same, of its keeper."""
    reset: int
    """Descriptor of the connection to the keeper, which makes a fresh working directory for each byte."""
    workdir: str
    """Working directory of programs. The slot itself stays outside of it, so that the keeper can replace it."""
    inside: Inside
    children: int = -1
    """Descriptor of the list of this process's children; -1 in a pid namespace, or if there is no such list."""
    failed: tuple[str, ...] = ()
    """Properties that this plan should provide and could not."""
    forks: int = -1
    """Descriptor at which the kernel asks before a process of the slot starts another; -1 if it does not."""
    may_count: bool = True
    """Whether the slot may join a control group; false if a program could change its group's limits."""


def open_children() -> int:
    """A descriptor of the list of this process's children, to be opened while /proc is readable; -1 if none."""
    me = os.getpid()
    try:
        return os.open(f"/proc/{me}/task/{me}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def start(plan: Plan, workdir: str, *, counted: bool) -> Walls:
    """Called in a fresh fork of the zygote, which becomes the slot's keeper and never returns. Returns in the slot
    only, in "/" and with unchanged descriptors. `workdir`: prefix of its folder's path if the plan has no namespaces.
    `counted`: a control group will count the slot's memory.

    Raises OSError if the walls cannot be built, in the keeper or, after its fork, in the slot."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    linux.die_with_parent(signal.SIGKILL)
    user = FIRST_USER + os.getpid()  # no other slot on this machine has it: process ids are below 2**22
    return start_inside(plan, user, counted) if plan.namespaces else start_beside(plan, user, workdir, counted)


def fork_slot(renew: Callable[[], None], workdir: str, inside: Inside) -> Walls:
    """Returns in the slot: its walls, as far as they are known so far. Never returns in the keeper."""
    keeper = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        keep(ours, pid, renew)
    ours.close()
    os.setpgid(0, 0)
    (process,) = PID.unpack(theirs.recv(PID.size, socket.MSG_WAITALL) or PID.pack(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(FIRST_TO_KILL)  # programs inherit it
    return Walls(process, keeper, theirs.detach(), workdir, inside)


def keep(channel: socket.socket, slot: int, renew: Callable[[], None]) -> NoReturn:
    """The keeper's loop. Consumes a byte per request to renew the working directory, answers each; waits for nothing
    else. Ends with the slot, whose end closes the channel; if the keeper is killed, the kernel kills the slot."""
    try:
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, LAST_DESCRIPTOR)
        channel.send(PID.pack(slot))
        while channel.recv(1):
            try:
                renew()
                answer = RENEWED
            except OSError:
                answer = FAILED
            channel.send(answer)
    except OSError:
        pass  # the slot ended before it had its answer
    try:
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(slot, signal.SIGKILL)
        os.waitpid(slot, 0)
    finally:
        os._exit(0)


def settled(walls: Walls) -> Walls:
    """In the slot, after its last change of user: have it end with its keeper, and check that the keeper still runs."""
    linux.die_with_parent(signal.SIGKILL)
    os.write(walls.reset, b"r")
    if os.read(walls.reset, 1) != RENEWED:
        raise OSError("the working directory could not be made anew")
    os.chdir("/")
    return walls


def start_inside(plan: Plan, user: int, counted: bool) -> Walls:
    """Start a slot with namespaces. user: the user that programs run as, if we are root."""
    outside, workdir = (os.geteuid(), os.getegid()), rootfs.workdir()
    linux.unshare(plan.namespaces)
    if plan is USER:
        linux.map_user(INSIDE_USER, *outside)
        linux.die_with_parent(signal.SIGKILL)
    inside = Inside(plan is ROOT, True)
    walls = fork_slot(partial(rootfs.renew_workdir, workdir), workdir, inside)
    socket.sethostname("sandbox")
    rootfs.build(workdir)
    linux.drop_bounding_set()
    if plan is ROOT:
        become(user)
    forks, missing = process_limit(inside)
    failed = confine(private_files=True, own_files=False, slot=os.getpid(), counted=counted)
    return settled(walls._replace(forks=forks, failed=(*missing, *failed)))


def start_beside(plan: Plan, user: int, workdir: str, counted: bool) -> Walls:
    """Start a slot without namespaces, beside the other processes of the machine. user: the user that programs run as,
    if we are root and that is possible."""
    is_root = os.geteuid() == 0
    is_apart = is_root and rootfs.readable_by_all()
    if is_root and not is_apart and plan is PROCESS:
        raise OSError("programs would run as root, because no other user can read the interpreter where it lies")
    folder = WorkFolder(workdir, user if is_apart else None)
    inside = Inside(is_apart, False)
    walls = fork_slot(folder.renew, folder.run, inside)
    linux.become_subreaper()
    walls = walls._replace(children=open_children(), may_count=is_apart or plan is CONFINED)
    linux.drop_bounding_set()
    if is_apart:
        become(user)
    forks, unlimited = process_limit(inside)
    is_scoped = plan is CONFINED and rootfs.confine_files(rootfs.sources(), folder.path)
    slot = os.getpid() if is_apart else None
    failed = confine(private_files=False, own_files=not is_apart, slot=slot, counted=counted)
    if plan is CONFINED and failed:
        raise OSError("the system-call filter could not be loaded")
    confine_signals = rootfs.scope_signals if is_scoped else None if failed else seccomp.deny_signals
    lacking = {"no_disk_quota": True, "same_user": not is_apart, "orphans_survive": walls.children < 0}
    missing = (*unlimited, *(name for name, lacks in lacking.items() if lacks))
    inside = inside._replace(confine_signals=confine_signals)
    return settled(walls._replace(inside=inside, forks=forks, failed=(*missing, *failed)))


def process_limit(inside: Inside) -> tuple[int, tuple[str, ...]]:
    """In the slot: `Walls.forks`, and the property that lacks if its processes cannot be limited."""
    if inside.own_user:  # RLIMIT_NPROC counts them
        return -1, ()
    with suppress(OSError, KeyError):  # an old kernel, or the container itself listens in this way
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, what="no_new_privs")
        return seccomp.ask_before_forks(), ()
    return -1, ("no_process_limit",)


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def confine(*, slot: int | None, **facts: bool) -> tuple[str, ...]:
    """Set up the walls of all plans; returns the failed properties. Arguments are those of `seccomp.build`."""
    linux.drop_capabilities()
    for limit, most in SHARED_COUNTS.items():
        resource.setrlimit(limit, (most, most))
    try:
        seccomp.install(seccomp.build(linux.machine(), slot=slot, **facts))
    except (OSError, KeyError):
        return ("no_seccomp",)
    return ()
