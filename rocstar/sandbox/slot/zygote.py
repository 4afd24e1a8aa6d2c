"""The zygote: a process with one tier's modules loaded and warm; every slot of the tier is a fork of it.

A separate interpreter, with a clean environment (`launch`) and one thread; it never sees a program. Consumes commands
from the daemon on one socket, and waits for nothing else; ends with the socket, and all its slots end with it.
"""

from __future__ import annotations

import errno
import gc
import glob
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from rocstar.sandbox.slot import channel, notebook, program, tiers
from rocstar.sandbox.slot.program import Base
from rocstar.sandbox.walls import folders, linux, plans
from rocstar.sandbox.walls.plans import Walls

CHANNEL = 3  # descriptor of a slot's connection to the daemon
MAX_COMMAND_BYTES = 4096
MAX_SWEEPS = 100  # each kills the visible processes; the next kills their orphans
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)  # a later try may succeed
LOOP = "rocstar.sandbox.slot._fork"
# Modules that programs import most, besides those that Python always loads.
COMMON = (
    "bisect collections.abc copy decimal fractions functools heapq itertools json math operator random re string time"
)


Slot = tuple[socket.socket, Walls]
"""Its connection to the daemon, and its walls."""


def main() -> None:
    """Preload, report it, then serve until the daemon closes. Forked slots and programs' processes run in here too.

    Settings come as JSON in the first argument: `fd`, `preload`, `workdirs`. First message to the daemon:
    {"problem": sentence or "", "arena": address and size, or null}. Commands:
    {"spawn": number, "plan": index, "counted": whether a control group will count its memory} with the slot's channel
    attached; {"lost": number} after a slot has ended. Never returns."""
    settings = json.loads(sys.argv[1])
    try:
        run(socket.socket(fileno=settings["fd"]), settings)
    except BrokenPipeError:  # the daemon ended while this process preloaded
        pass
    except Exception:
        traceback.print_exc()  # a bug in rocstar; the daemon sees the connection close
    finally:
        os._exit(0)


def run(commands: socket.socket, settings: dict[str, Any]) -> None:
    linux.die_with_parent(signal.SIGKILL)
    for name in ("LD_BIND_NOW", "PYTHONHASHSEED"):
        os.environ.pop(name, None)  # for our processes, not for those that programs start
    del sys.argv[1:]
    with program.own_streams():
        problem = load(settings["preload"])
        seeder = program.Seeder()
        gc.collect()  # before the warm-up, because it empties the interpreter's lists of free objects
        warm_up(Base(0, plans.Inside(True, True), seeder))
    if problem:
        commands.send(json.dumps({"problem": problem}).encode())
        return
    loop = importlib.import_module(LOOP)
    gc.freeze()
    with open("/proc/self/statm") as file:  # in use before any program; limits are added to it
        memory = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    commands.send(json.dumps({"problem": "", "arena": loop.arena}).encode())
    slot = Zygote(commands, settings["workdirs"]).serve()
    if slot is not None:
        connection, walls = slot
        os.environ["HOME"] = os.environ["TMPDIR"] = walls.workdir
        gc.freeze()  # so that objects not frozen at the end of a program are its own
        run_payload(loop.serve(connection, walls), Base(memory, walls.inside, seeder))


def run_payload(control: int, base: Base) -> NoReturn:
    """In a process that a slot has forked: receive the daemon's payload and run it."""
    try:
        if not base.inside.private_processes:
            linux.die_with_parent(signal.SIGKILL)
        task = channel.receive(control)
        if isinstance(task, channel.Program):
            program.main(task, control, base)
        elif isinstance(task, channel.NotebookPayload):
            notebook.main(task, control, base)
        elif isinstance(task, channel.Become):
            notebook.become(task, control, base)
    finally:
        os._exit(1)


def load(preload: Sequence[str]) -> str:
    """Import the modules; a sentence about the first failure, else ""."""
    for name in COMMON.split():
        importlib.import_module(name)
    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"sandbox.preload names {name!r}, which cannot be imported ({error}); install it or take it out"
    if sys.version_info >= (3, 14):
        fork_by_default()
    return ""


def repeat_interrupted_forks() -> None:
    """While the kernel asks the daemon (`daemon.watch.Forks`), a signal that Python handles ends a fork with EINTR. No
    fork ends so elsewhere, so no program expects it. Threads, and subprocesses without a `preexec_fn`, are started with
    all signals blocked."""
    for module, name in ((os, "fork"), (importlib.import_module("_posixsubprocess"), "fork_exec")):
        setattr(module, name, partial(until_started, getattr(module, name)))


def until_started(start: Callable[..., int], *arguments: Any) -> int:
    while True:
        with suppress(InterruptedError):
            return start(*arguments)


def fork_by_default() -> None:
    """Let `multiprocessing` fork if a program names no other method, as before Python 3.14: a program is not a file
    that a fork server could import, and here a fork server is not notified when its children end."""
    from multiprocessing import context

    context._default_context._default_context = context._concrete_contexts["fork"]  # type: ignore[attr-defined]


def warm_up(base: Base) -> None:
    """Run the warm-up programs in this process."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        for code in tiers.warm_up_programs():
            task = channel.Program(code, "", {}, (), 0, 1.0, 2**29, 1000, 16)
            ours.sendall(channel.pack(task))
            program.warm_up(theirs.fileno(), base)
            with suppress(BlockingIOError):  # it had nothing to report
                ours.recv(MAX_COMMAND_BYTES)


class Zygote:
    """Starts slots. By a slot's number, `keepers` has the process id of its keeper, and `removers` that of the process
    that removes the folders of earlier slots."""

    def __init__(self, commands: socket.socket, workdirs: str) -> None:
        self.commands = commands
        self.workdirs = workdirs
        self.keepers: dict[int, int] = {}
        self.removers: dict[int, int] = {}

    def serve(self) -> Slot | None:
        """Carry out commands; None when the daemon has closed. Returns the slot in a forked slot."""
        linux.become_subreaper()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no reaping; the daemon sees their slots' channels
        children = plans.open_children()
        while True:
            data, fds, _, _ = socket.recv_fds(self.commands, MAX_COMMAND_BYTES, 1)
            if not data:
                return None
            command = json.loads(data)
            number = command["lost"] if "lost" in command else command["spawn"]
            self.keepers.pop(number, None)
            self.removers.pop(number, None)
            self.sweep(children)
            self.remove_folders(number)
            if "lost" in command:
                continue
            slot = self.spawn(command, fds[0])
            if slot is not None:
                return slot

    def sweep(self, children: int) -> None:
        """Kill the processes of ended slots: without a pid namespace they become children of the zygote."""
        for _ in range(MAX_SWEEPS):
            if not plans.kill_children(children, {*self.keepers.values(), *self.removers.values()}):
                return
            time.sleep(0.001)

    def remove_folders(self, number: int) -> None:
        """Remove the folders of ended slots in another process, because they may hold a million files. What it leaves
        is tried again when the next slot of this number starts or ends."""
        if not (left := glob.glob(f"{glob.escape(self.workdirs)}-{number}-*")):
            return
        with suppress(OSError):
            pid = self.removers[number] = os.fork()
            if pid == 0:
                try:
                    os.closerange(CHANNEL, plans.LAST_DESCRIPTOR)  # by their ends the daemon sees who has ended
                    for folder in left:
                        folders.remove(folder)
                finally:
                    os._exit(0)

    def spawn(self, command: dict[str, Any], fd: int) -> Slot | None:
        """Fork a slot and its keeper. Returns the slot in the slot, None in the zygote."""
        try:
            pid = os.fork()
        except OSError as error:  # the machine has no room for a process now; the daemon retries
            with socket.socket(fileno=fd) as connection:
                send_hello(connection, f"the sandbox zygote could not fork ({error})", busy=True)
            return None
        if pid:
            os.close(fd)
            self.keepers[command["spawn"]] = pid
            return None
        try:
            return become_slot(command, f"{self.workdirs}-{command['spawn']}", fd)
        except BaseException:
            os._exit(1)


def become_slot(command: dict[str, Any], workdir: str, fd: int) -> Slot:
    """In a fresh fork: become the keeper, which never returns, and the slot, which does."""
    plan = plans.PLANS[command["plan"]]
    os.setsid()  # without control groups the scheduler may still give each session an equal share of the CPU
    keep_descriptors(fd)
    connection = socket.socket(fileno=CHANNEL)
    try:
        walls = plans.start(plan, workdir, counted=command["counted"])
    except OSError as error:
        send_hello(connection, f"{plan.name}: {error}", busy=error.errno in NO_ROOM)
        raise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (folders.FILE_BYTES, folders.FILE_BYTES))
    send_hello(connection, walls=walls)
    if walls.forks >= 0:
        os.close(walls.forks)
        repeat_interrupted_forks()
    return connection, walls


def keep_descriptors(connection: int) -> None:
    """Set the three standard streams to /dev/null and CHANNEL to the connection; close all other descriptors."""
    if connection != CHANNEL:
        os.dup2(connection, CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(CHANNEL + 1, plans.LAST_DESCRIPTOR)


def send_hello(connection: socket.socket, problem: str = "", *, busy: bool = False, walls: Walls | None = None) -> None:
    """A slot's first message, with `Walls.forks`."""
    facts: dict[str, object] = {"problem": problem, "busy": busy}
    if walls:
        facts |= {"failed": walls.failed, "may_count": walls.may_count, "slot": walls.process, "keeper": walls.keeper}
    attached = [walls.forks] if walls and walls.forks >= 0 else []
    with suppress(OSError):  # the daemon has ended
        socket.send_fds(connection, [json.dumps(facts).encode()], attached)
