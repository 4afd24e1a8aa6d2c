"""A daemon from start to end: probes the machine, acquires its resources, serves, and releases everything.

Started by `start_daemon`; exchanges `wire` frames on the descriptor in its settings; ends when that closes or
the process that started it ends, and all its processes end with it. Not here: serving (`queue`).
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from zlib import crc32

import msgspec

from rocstar.sandbox import check, container, wire
from rocstar.sandbox.call import (
    Call,
    DaemonInfo,
    DaemonSettings,
    Isolation,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
)
from rocstar.sandbox.daemon import WORKDIRS, watch
from rocstar.sandbox.daemon.pool import Pool, Pools
from rocstar.sandbox.daemon.queue import Queue
from rocstar.sandbox.daemon.worker import ProgramRun
from rocstar.sandbox.slot import zygote
from rocstar.sandbox.slot.program import MOST_FILES
from rocstar.sandbox.walls import cgroups, folders, linux, plans
from rocstar.sandbox.walls.cgroups import Groups
from rocstar.sandbox.wire import FrameKind

PROBE_LIMITS = Limits(wall_seconds=20.0)
PROBE = r"""
import ctypes, os, socket, sys

def can(act, *values):
    try:
        act(*values)
        return True
    except OSError:
        return False

def read(path):
    with open(path) as file:
        file.read(1)

def write(path):
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))

def connect():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))

folders = ("/", "/usr", "/var/tmp", "/dev", sys.prefix, sys.base_prefix)
written = [folder for folder in folders if can(write, f"{folder}/.probe")]
for folder in written:
    can(os.unlink, f"{folder}/.probe")
found = {
    "files_visible": any(can(read, path) for path in ("/etc/hosts", "/etc/group", "/etc/hostname", "/etc/fstab")),
    "files_writable": written,
    "proc_visible": can(read, f"/proc/{os.getppid()}/stat"),
    "network_reachable": can(connect),
    "processes_signalable": can(os.kill, os.getppid(), 0),
    "namespaces_allowed": ctypes.CDLL(None).unshare(0x10000000) == 0,
}
print(*(name for name, holds in found.items() if holds))
"""
"""A program that prints a name for each property that the walls should provide and do not."""


def main() -> None:
    """Serve until the client closes or its process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only its client ends it; zygotes inherit this
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGCONT, what="parent death signal")  # one that is stopped ends too
    values = json.loads(sys.argv[1])
    settings = msgspec.convert(values, DaemonSettings)
    connection = socket.socket(fileno=values["fd"])
    connection.setblocking(False)
    with ExitStack() as cleanup:
        lock_workdirs(Path(values["workdirs"]), cleanup)
        groups = cgroups.found() if settings.groups else cgroups.Groups()
        cleanup.callback(groups.close)
        asyncio.run(serve(connection, settings, values["workdirs"], groups, values["parent"]))


def lock_workdirs(folder: Path, cleanup: ExitStack) -> None:
    """Make the folder for working directories and lock it; remove the folders of dead daemons."""
    with suppress(OSError):  # if it cannot be made, the plans that need it report that
        folders.sweep(folder.parent, WORKDIRS)
        lock = folders.make_locked(folder)
        cleanup.callback(os.close, lock)
        cleanup.enter_context(suppress(OSError))  # the next daemon retries a failed removal
        cleanup.callback(folders.remove, str(folder))


async def serve(client: socket.socket, settings: DaemonSettings, workdirs: str, groups: Groups, parent: int) -> None:
    """Start the first slots, then serve until the client closes or its process ends."""
    loop = asyncio.get_running_loop()
    pools = Pools(settings, workdirs, groups)
    try:
        refuse_old_loop()
        refuse_low_limits()
        bare = await pools.start(plans.PLANS[settings.skip_plans :])
        info = checked_info(pools, await failed_probes(pools, bare))
    except SandboxDown as error:
        await loop.sock_sendall(client, wire.pack(FrameKind.REFUSED, 0, wire.encode(str(error))))
        return
    queue = Queue(settings, info, pools)
    loop.add_signal_handler(signal.SIGTERM, queue.gone.set)  # a scheduler sends it to all processes of a job
    with suppress(ProcessLookupError):  # it has ended, which its connection reports too
        loop.add_reader(os.pidfd_open(parent), queue.gone.set)
    gc.freeze()
    gc.set_threshold(50_000)  # a call leaves no reference cycles; searching for them took a twentieth of its time
    await loop.connect_accepted_socket(lambda: queue, client)
    lost = asyncio.create_task(pools.failed.wait())
    gone = asyncio.create_task(queue.gone.wait())
    watching = asyncio.create_task(watch.watch(pools.workers, (queue.sessions.look, pools.shortages.look)))
    await asyncio.wait((lost, gone, watching), return_when=asyncio.FIRST_COMPLETED)
    if not pools.plan.namespaces:
        watch.kill_all([worker.process for worker in pools.workers()])


def refuse_old_loop() -> None:
    """Raises SandboxDown unless the loop in C was compiled from its present source. Not done in a zygote, whose every
    fork would copy the mappings of zlib."""
    try:
        loop = importlib.import_module(zygote.LOOP)
    except ImportError as error:
        advice = "install a C compiler and Python's headers, then install rocstar again"
        raise SandboxDown(f"the sandbox's loop in C was not compiled ({error}); {advice}") from error
    source = Path(zygote.__file__).with_name("_fork.c")  # a wheel has none
    if source.exists() and crc32(source.read_bytes()) != getattr(loop, "source", None):
        problem = f"the sandbox's loop in C was compiled from another version of {source.name}"
        raise SandboxDown(f"{problem}; install rocstar again")


def refuse_low_limits() -> None:
    """Raises SandboxDown where the limits of this process are below those that a program gets."""
    hard = container.open_files()  # each running program takes four
    if hard != resource.RLIM_INFINITY and hard < MOST_FILES:
        problem = f"a program may open {MOST_FILES} files, and a process here {hard}"
        raise SandboxDown(f"{problem}; raise the hard limit of open files to 4096 (ulimit -Hn)")
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if largest != resource.RLIM_INFINITY and largest < folders.FILE_BYTES:
        problem = f"a program may write files of {folders.FILE_BYTES} bytes, and a process here of {largest}"
        raise SandboxDown(f"{problem}; raise the hard limit of a file's size (ulimit -Hf)")
    if refusal := check.of_machine(Limits()):
        raise SandboxDown(refusal)
    data = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))  # programs inherit it; a slot sets all other HARD_LIMITS


async def failed_probes(pools: Pools, pool: Pool) -> tuple[str, ...]:
    """Properties that the walls lack, found by running PROBE. Raises SandboxDown when PROBE itself does not run."""
    response: Response | None = None
    for _ in range(2):  # a machine that is busy during the start may miss one deadline
        if pool.idle and (response is None or response.outcome is ServiceOutcome.INTERNAL):
            answered: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
            call, worker = Call(id="probe", code=PROBE, limits=PROBE_LIMITS), pool.idle.pop()
            ProgramRun(call, worker, pools.settings.grace_seconds, answered.set_result).start()
            response = await answered
    if response is None or response.outcome is not ProgramOutcome.OK:
        reason = "its slot died" if response is None else f"{response.outcome}: {response.stderr.strip()[-300:]}"
        raise SandboxDown(f"the sandbox started as {pools.plan.level} but cannot run a program ({reason})")
    return tuple(dict.fromkeys([*worker.failed, *response.stdout.split()]))


def checked_info(pools: Pools, failed: tuple[str, ...]) -> DaemonInfo:
    """Raises SandboxDown when the level in force is below the required one."""
    settings = pools.settings
    level, required = Isolation(pools.plan.level), settings.min_isolation
    if level < required:
        advice = (
            "permit namespaces (docs/sandbox.md, 'In a container', says how), or lower it by sandbox.min_isolation="
            f"{level} (--min-isolation of rocstar sandbox) after reading there what programs can reach then"
        )
        tried = "; ".join(pools.problems) or "every way to isolate was tried that this machine has"
        problem = f"the sandbox reaches isolation {level} here and min_isolation asks for {required}"
        raise SandboxDown(f"{problem}; {advice} ({tried})")
    return DaemonInfo(
        isolation=level,
        failed_probes=tuple(failed),
        slots=settings.slots,
        session_slots=settings.session_slots,
        preload=settings.preload,
        tiers=tuple(tier.name for tier in pools.order),
        node=socket.gethostname(),
    )
