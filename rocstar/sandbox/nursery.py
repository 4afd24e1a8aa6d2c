"""The nursery: a process with one tier's modules loaded and warm, which every slot of the tier is a fork of.

An interpreter of its own, with a clean environment and one thread; it never sees a program. Where the compiled part
(`_fork.c`) was built and works here, its memory is put into a file that all slots share; else slots fork from Python.
Consumes commands from the host on one socket; ends with it, and takes all slots along.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rocstar.sandbox import hooks, jail, linux, program, rehearsal, session_slot, slot, slotwire
from rocstar.sandbox.hooks import Hooks
from rocstar.sandbox.jail import Jail
from rocstar.sandbox.membership import Membership

CHANNEL = 3  # a slot's descriptor besides the standard three, before it opens its own
LAST_DESCRIPTOR = 256  # a nursery holds far fewer
MAX_COMMAND_BYTES = 4096
MAX_SWEEPS = 100  # each takes what it sees; the next takes the orphans that made
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)  # it may be had later
HELLO = struct.Struct("!I")
# What programs import most, beside what Python loads anyway.
COMMON = (
    "bisect",
    "cmath",
    "collections.abc",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "time",
    "typing",
)


@dataclass(frozen=True, slots=True)
class Raised:
    """A slot that has just been raised: what `main` has to know in it."""

    channel: socket.socket
    walls: Jail
    report: int
    """Descriptor of the memory in which a program's process says what became of it."""
    session: bool
    """It keeps the states of a notebook (`session_slot`), instead of forgetting every program."""


def main() -> None:
    """Preload, say so, then obey until the host goes away; in slots and in programs' processes, be that.

    Settings come as JSON in the first argument: `fd`, `preload`, `workdirs`, `compiled`. Never returns.
    Commands: {"spawn": number, "plan": index, "groups": [files], "controllers": [names]}, and "session" for one of
    those, with the slot's channel attached;
    {"kill": number} for a slot that hangs; {"lost": number} for one that died."""
    settings = json.loads(sys.argv[1])
    try:
        run(socket.socket(fileno=settings["fd"]), settings)
    except Exception:
        traceback.print_exc()  # a bug of ours; the host sees the connection close
    finally:
        os._exit(0)


def run(commands: socket.socket, settings: dict[str, Any]) -> None:
    linux.die_with_parent(signal.SIGKILL)
    os.setsid()  # slots share this session: the scheduler weighs processes by niceness within one only
    os.environ.clear()
    os.environ.update(jail.ENVIRONMENT)
    del sys.argv[1:]
    with hooks.put_off() as later, program.own_streams():
        problem = load(settings["preload"])
        rehearsal.run()
    if problem:
        commands.send(json.dumps({"problem": problem}).encode())
        return
    compiled = compiled_part() if settings["compiled"] else None
    hello = {"problem": "", "fork_path": "c" if compiled else "python"}
    memory = base_memory()
    gc.collect()
    gc.freeze()
    if compiled is not None:
        with suppress(OSError):  # where memory cannot be exchanged, and nothing has been obeyed yet
            serve_compiled(compiled, Nursery(commands, settings["workdirs"], hello), memory, later)
            return
    raised = Nursery(commands, settings["workdirs"], hello | {"fork_path": "python"}).obey()
    if raised is not None:
        serve = session_slot.main if raised.session else slot.main
        serve(raised.channel, raised.walls, raised.report, memory, later)


def load(preload: Sequence[str]) -> str:
    """Import the modules; a sentence about the first that fails, else nothing."""
    for name in COMMON:
        importlib.import_module(name)
    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"sandbox.preload names {name!r}, which cannot be imported ({error}); install it or take it out"
    return ""


def compiled_part() -> ModuleType | None:
    """None where it was not built, or where a preloaded module has started threads."""
    if len(os.listdir("/proc/self/task")) > 1:
        return None
    try:
        return importlib.import_module("rocstar.sandbox._fork")
    except ImportError:
        return None


def base_memory() -> int:
    """Address space in use before any program, bytes; limits come on top of it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def serve_compiled(compiled: ModuleType, nursery: Nursery, memory: int, later: Hooks) -> None:
    """Raises OSError, having done nothing, where memory cannot be exchanged."""

    def raise_slot(snapshot: int) -> tuple[Any, ...] | None:
        raised = nursery.obey(snapshot)
        if raised is not None and raised.session:
            session_slot.main(raised.channel, raised.walls, raised.report, memory, later)
            os._exit(0)
        return None if raised is None else compiled_slot(raised, memory)

    served = compiled.serve(raise_slot)
    if served is not None:
        is_program, payload, settings, report = served
        if not is_program:
            program.tidy(payload)
        program.main(payload, settings, report, later)


def compiled_slot(raised: Raised, memory: int) -> tuple[Any, ...]:
    """What `_fork.serve` has to know of a slot."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # PID 1 is immune to every signal it has no handler for
    walls = raised.walls
    clean_inodes = -1 if walls.clean_inodes is None else walls.clean_inodes
    settings = program.pack_settings(memory, walls.inside)
    private = walls.inside.private_processes
    descriptors = (raised.channel.detach(), walls.maps, raised.report, walls.children)
    oom = (walls.shield.fd, walls.shield.ordinary)
    return (*descriptors, private, walls.may_age, clean_inodes, walls.mode, *oom, settings)


class Nursery:
    """Raises slots and ends them. `slots` holds the process of each by number: with namespaces its guardian."""

    def __init__(self, commands: socket.socket, workdirs: str, hello: dict[str, Any]) -> None:
        self.commands = commands
        self.workdirs = workdirs
        self.hello = hello
        self.slots: dict[int, int] = {}

    def obey(self, snapshot: int = -1) -> Raised | None:
        """Until the host goes away: None. In a slot: that slot. `snapshot`: descriptor the slot must keep."""
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer to act on
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots need no reaping; the host sees their channel close
        self.commands.send(json.dumps(self.hello).encode())
        children = jail.open_children()
        while True:
            data, fds, _, _ = socket.recv_fds(self.commands, MAX_COMMAND_BYTES, 1)
            if not data:
                return None
            command = json.loads(data)
            if "kill" in command:
                self.kill(command["kill"])
                continue
            number = command["lost"] if "lost" in command else command["spawn"]
            self.slots.pop(number, None)
            self.sweep(children)
            if "lost" in command:
                continue
            raised = self.spawn(command, fds[0], snapshot)
            if raised is not None:
                return raised

    def sweep(self, children: int) -> None:
        """Without a pid namespace, what a dead slot's program has started comes here."""
        for _ in range(MAX_SWEEPS):
            if not jail.kill_children(children, self.slots.values()):
                return
            time.sleep(0.001)

    def kill(self, number: int) -> None:
        pid = self.slots.pop(number, None)
        if pid is not None:
            jail.kill_quietly(pid)

    def spawn(self, command: dict[str, Any], fd: int, snapshot: int) -> Raised | None:
        """Fork; the slot, in the slot."""
        number, session = command["spawn"], "session" in command
        try:
            pid = os.fork()
        except OSError as error:
            refuse(fd, error)
            return None
        if pid:
            os.close(fd)
            self.slots[number] = pid
            return None
        try:
            return become_slot(command, f"{self.workdirs}-{number}", fd, -1 if session else snapshot)
        except BaseException:
            os._exit(1)


def refuse(fd: int, error: OSError) -> None:
    """Tell the host that the machine has no room for another process now; it asks again later."""
    with socket.socket(fileno=fd) as channel, suppress(OSError):
        say_hello(channel, {"problem": f"the sandbox nursery could not fork ({error})", "busy": True})


def become_slot(command: dict[str, Any], workdir: str, fd: int, snapshot: int) -> Raised:
    plan = jail.PLANS[command["plan"]]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keep_descriptors(fd, snapshot)
    channel = socket.socket(fileno=CHANNEL)
    process = os.getpid()  # of the guardian, where there is one
    report = os.memfd_create("rocstar-report")
    os.truncate(report, slotwire.REPORT_BYTES)
    try:
        walls = jail.start(plan, command["spawn"], workdir, membership(command))
    except OSError as error:
        say_hello(channel, {"problem": f"{plan.name}: {error}", "busy": error.errno in NO_ROOM})
        raise
    say_hello(channel, {"problem": "", "failed": walls.failed, "groups": walls.groups, "process": process})
    return Raised(channel, walls, report, "session" in command)


def membership(command: dict[str, Any]) -> Membership:
    """Of no group where a file of them cannot be opened: then the slot says that it is not counted."""
    try:
        files = tuple(os.open(path, os.O_WRONLY) for path in command["groups"])
    except OSError:
        return Membership()
    return Membership(files, tuple(command["controllers"]))


def keep_descriptors(channel: int, snapshot: int) -> None:
    """The standard three lead nowhere, then comes the channel; of all others the snapshot stays, where it is."""
    if channel != CHANNEL:
        os.dup2(channel, CHANNEL)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for standard in range(3):
        os.dup2(nothing, standard)
    kept = snapshot if snapshot >= 0 else LAST_DESCRIPTOR
    os.closerange(CHANNEL + 1, kept)
    os.closerange(kept + 1, LAST_DESCRIPTOR)


def say_hello(channel: socket.socket, message: dict[str, object]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(HELLO.pack(len(body)) + body)
