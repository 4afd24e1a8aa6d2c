"""The nursery: a small process with the preloaded modules, which every slot is a fork of.

It is forked from the host before that imports anything large, stays single-threaded, and never sees a program.
Consumes commands from the host on one socket; ends with it, and takes all slots along.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial

from rocstar.sandbox import jail, linux, slot
from rocstar.sandbox.jail import Jail, Plan

CHANNEL = 3  # a slot's only descriptor besides the standard three, before it opens its own
MAX_COMMAND_BYTES = 4096
MAX_SWEEPS = 100  # each takes what it sees; the next takes the orphans that made
HELLO = struct.Struct("!I")


def main(commands: socket.socket, preload: Sequence[str], workdirs: str) -> None:
    """Preload, say so, then obey until the host goes away.

    Commands: {"spawn": number, "plan": index} with the slot's channel attached; {"kill": number}."""
    linux.die_with_parent(signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1, what="child subreaper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer to act on
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots that end need no reaping; the host sees their channel close
    problem = load(preload)
    commands.send(json.dumps({"problem": problem}).encode())
    if not problem:
        gc.collect()
        gc.freeze()
        obey(commands, workdirs, base_memory())


def load(preload: Sequence[str]) -> str:
    """Import the modules; a sentence about the first that fails, else nothing."""
    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"sandbox.preload names {name!r}, which cannot be imported ({error}); install it or take it out"
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # loaded late otherwise, and then not seeded
    random.seed(0)
    return ""


def base_memory() -> int:
    """Address space in use before any program, bytes; limits come on top of it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def obey(commands: socket.socket, workdirs: str, memory: int) -> None:
    slots: dict[int, int] = {}
    children = jail.open_children()
    while True:
        data, fds, _, _ = socket.recv_fds(commands, MAX_COMMAND_BYTES, 1)
        if not data:
            return
        command = json.loads(data)
        if "kill" in command:
            kill(slots.pop(command["kill"], None))
            continue
        number = command["spawn"]
        slots.pop(number, None)
        sweep(children, slots)
        workdir = f"{workdirs}/{number}"
        slots[number] = spawn(jail.PLANS[command["plan"]], number, workdir, fds[0], memory)


def sweep(children: int, slots: dict[int, int]) -> None:
    """Without a pid namespace, what a dead slot's program has started comes here."""
    for _ in range(MAX_SWEEPS):
        if not jail.kill_children(children, slots.values()):
            return
        time.sleep(0.001)


def kill(pid: int | None) -> None:
    if pid is not None:
        jail.kill_quietly(pid)


def spawn(plan: Plan, number: int, workdir: str, fd: int, memory: int) -> int:
    """Fork a slot; its process id."""
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        become_slot(plan, number, workdir, fd, memory)
    finally:
        os._exit(1)


def become_slot(plan: Plan, number: int, workdir: str, fd: int, memory: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if fd != CHANNEL:
        os.dup2(fd, CHANNEL)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(CHANNEL + 1, 256)
    channel = socket.socket(fileno=CHANNEL)
    try:
        jail.start(plan, number, workdir, channel, partial(serve, channel, memory))
    except OSError as error:
        say_hello(channel, {"problem": f"{plan.name}: {error}"})


def serve(channel: socket.socket, memory: int, walls: Jail) -> None:
    say_hello(channel, {"problem": "", "failed": walls.failed})
    slot.main(channel, walls, memory)


def say_hello(channel: socket.socket, message: dict[str, object]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(HELLO.pack(len(body)) + body)
