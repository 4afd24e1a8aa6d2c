"""The zygote: a process with one tier's modules loaded and warm; every slot of the tier is a fork of it.

A separate interpreter with a clean environment and one thread; it never sees a program. Consumes commands from the
daemon on one socket, and waits for nothing else; ends with the socket, and all its slots end with it.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from rocstar.sandbox.slot import channel, notebook, program
from rocstar.sandbox.slot.program import Base
from rocstar.sandbox.walls import folders, linux, plans
from rocstar.sandbox.walls.plans import Walls

CHANNEL = 3  # descriptor of a slot's connection to the daemon
MAX_COMMAND_BYTES = 4096
LIST_BYTES = 65536  # of process ids of children
MAX_SWEEPS = 100  # each kills the visible processes; the next kills their orphans
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)  # a later try may succeed
LOOP = "rocstar.sandbox.slot._fork"
# Modules that programs import most, besides those that Python always loads.
COMMON = (
    "bisect collections.abc copy decimal fractions functools heapq itertools json math operator random re string time"
)

# The warm-up that a zygote does once for all programs: run common code paths and fill the caches of libraries. Results
# are thrown away; if a line fails with a newer library, programs only take longer.

ROUNDS = 12  # Python rewrites the instructions of a function that was run about eight times; every write costs a page
EVERYDAY = (
    "print(1)",
    "import math\nprint(math.gcd(12, 18))",
    "def f(x):\n    return x * 2\nprint(f(2), [f(n) for n in range(3)])\nf(3)",
    "x = {'a': 1.5}\nfor k, v in x.items():\n    print(f'{k}={v:.2f}', sorted(x))\nx",
    "import sys\nprint(sys.version_info[0], file=sys.stderr)\nif 1: pass",
)
FAILING = (
    "def f():\n    return 1 / 0\nf()",
    "x = = 1",
    "raise ValueError('no')",
    "import no_such_module",
    "raise SystemExit(1)",
)
# module: a program with the most used functions of it.
LIBRARIES = {
    "numpy": """
import numpy as np
a = np.eye(3) + np.arange(9.0).reshape(3, 3)
np.linalg.det(a), np.linalg.inv(a), np.linalg.solve(a, np.ones(3)), np.linalg.eigvals(a), np.linalg.norm(a)
repr(a), str(np.float64(1.5)), a @ a.T, a.sum(axis=0).mean(), np.random.rand(2), np.array([1, 2]).tolist()
np.polyfit([0, 1, 2], [1, 2, 5], 1), np.roots([1, -3, 2]), np.where(a > 1, a, 0)
""",
    "sympy": """
import sympy as sp
x, y, n = sp.symbols("x y n")
sp.integrate(sp.sin(x) ** 2, (x, 0, 1)), sp.integrate(x * sp.exp(x), x), sp.diff(sp.log(x) * x, x)
sp.solve(x**2 - 3 * x + 2, x), sp.solve([x + y - 3, x - y - 1], [x, y]), sp.solve(x**3 - 2 * x - 4)
sp.simplify((x**2 - 1) / (x - 1)), sp.factor(x**3 - 1), sp.expand((x + y) ** 3), sp.limit(sp.sin(x) / x, x, 0)
sp.Matrix([[1, 2], [3, 4]]).inv(), sp.Rational(3, 4) + sp.sqrt(2), sp.N(sp.pi, 20), sp.factorint(360)
sp.summation(n, (n, 1, 10)), sp.series(sp.cos(x), x, 0, 4), sp.gcd(12, 18), sp.nsimplify(0.25), sp.isprime(97)
str(sp.sqrt(8) / 2), repr(x**2 + 1), sp.latex(x / y), sp.sympify("2*x + 1"), (x > 1), sp.trigsimp(sp.sin(x) ** 2)
""",
    "scipy": """
import scipy.integrate, scipy.linalg, scipy.optimize, scipy.special, scipy.stats
scipy.integrate.quad(lambda t: t * t, 0, 1), scipy.optimize.brentq(lambda t: t - 0.5, 0, 1)
scipy.optimize.minimize(lambda t: (t[0] - 1) ** 2, [0.0]), scipy.special.comb(5, 2, exact=True)
scipy.stats.norm.cdf(1.0), scipy.stats.binom.pmf(1, 3, 0.5)
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"]})
frame.groupby("b").a.sum(), repr(frame), frame.describe(), frame.sort_values("a").iloc[0]
""",
}


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
        except Exception as error:  # a name that is none, and what the module itself raises
            return f"sandbox.preload names {name!r}, which cannot be imported ({error}); install it or take it out"
    # `multiprocessing` forks if a program names no other method, as before Python 3.14: a program is not a file that a
    # fork server could import, and here a fork server is not notified when its children end.
    if sys.version_info >= (3, 14):
        context = importlib.import_module("multiprocessing.context")
        context._default_context._default_context = context._concrete_contexts["fork"]
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


def warm_up_programs() -> Iterator[str]:
    """The programs to run, for the loaded modules."""
    for name, code in LIBRARIES.items():
        if name in sys.modules:
            yield code
    for _ in range(ROUNDS):
        yield from EVERYDAY + FAILING


def warm_up(base: Base) -> None:
    """Run the warm-up programs in this process."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        for code in warm_up_programs():
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

    def serve(self) -> tuple[socket.socket, Walls] | None:
        """Carry out commands; None when the daemon has closed. In a forked slot: its connection to the daemon, and its
        walls."""
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
        """Kill the processes of ended slots: without a pid namespace they become children of the zygote. children: see
        `plans.open_children`. All are stopped first: a stopped process cannot fork."""
        kept = {*self.keepers.values(), *self.removers.values()}
        for _ in range(MAX_SWEEPS if children >= 0 else 0):
            if not (others := {*map(int, os.pread(children, LIST_BYTES, 0).split())} - kept):
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in others:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
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

    def spawn(self, command: dict[str, Any], fd: int) -> tuple[socket.socket, Walls] | None:
        """Fork a slot and its keeper. Returns as `serve` in the slot, None in the zygote."""
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


def become_slot(command: dict[str, Any], workdir: str, fd: int) -> tuple[socket.socket, Walls]:
    """In a fresh fork: become the keeper, which never returns, and the slot, which does."""
    plan = plans.PLANS[command["plan"]]
    os.setsid()  # without control groups the scheduler may still give each session an equal share of the CPU
    if fd != CHANNEL:
        os.dup2(fd, CHANNEL)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(CHANNEL + 1, plans.LAST_DESCRIPTOR)
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


def send_hello(connection: socket.socket, problem: str = "", *, busy: bool = False, walls: Walls | None = None) -> None:
    """A slot's first message, with `Walls.forks`."""
    facts: dict[str, object] = {"problem": problem, "busy": busy}
    if walls:
        facts |= {"failed": walls.failed, "may_count": walls.may_count, "slot": walls.process, "keeper": walls.keeper}
    attached = [walls.forks] if walls and walls.forks >= 0 else []
    with suppress(OSError):  # the daemon has ended
        socket.send_fds(connection, [json.dumps(facts).encode()], attached)
