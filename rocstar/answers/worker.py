"""The processes behind `pool.py`: a warm one that imports a function once, and workers forked from it that call it.

Not here: any wall against the function. It is the operator's own code, and never the model's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BACKSTOP = 3  # address space a worker may add, in memory limits: stops one huge allocation; resident memory decides
WALL = 20  # deadlines of CPU time; a call that has waited so long for the CPU is the machine's fault
MAX_TEXT = 4000  # characters of an error sent back


def main(fd: int, target: str, prepare: str, memory_bytes: int) -> None:
    """The warm process. Sends "ready", or why not, on the socket `fd`, then forks a worker for each connection it is
    sent and confirms it. The socket's close ends it."""
    control = socket.socket(fileno=fd)
    os.dup2(2, 1)  # what a library prints must not reach the parent's results
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)  # it may be ignored or blocked in the parent, which we inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        function = load(target)
        if prepare:
            load(prepare)()
    except BaseException as error:
        control.send(describe(error).encode())
        return
    gc.freeze()  # a collection in a worker would copy the pages that it shares
    control.send(b"ready")
    while (received := socket.recv_fds(control, 1, 1))[0]:
        if not os.fork():
            control.close()
            keep(Connection(received[1][0]), function, memory_bytes)
            os._exit(0)
        os.close(received[1][0])
        control.send(b"w")


def keep(connection: Connection, function: Callable[[Any], Any], memory_bytes: int) -> None:
    """Fork a worker and report the signal that ends it: only its own alarms say that a call took too long, however
    long ago it began."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (worker := os.fork()):
        serve(connection, function, memory_bytes)
        os._exit(0)
    number = os.WTERMSIG(os.waitpid(worker, 0)[1])
    with suppress(OSError):  # nobody asks any more
        connection.send_bytes(json.dumps({"kind": "killed", "value": number, "full": True}).encode())


def serve(connection: Connection, function: Callable[[Any], Any], memory_bytes: int) -> None:
    """A worker. Consumes {"payload", "seconds"}, produces {"kind": "value", "memory" or "raised", "value", "full"};
    its keeper adds "killed". The kernel's alarm ends a call at its deadline, and its worker with it; the connection's
    close ends an idle one."""
    base = memory("VmRSS")
    space = memory("VmSize") + BACKSTOP * memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    while True:
        try:
            question = json.loads(connection.recv_bytes())
        except EOFError:
            return
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak of this call
        before = memory("VmRSS")
        _set_alarm(question["seconds"])
        answer = answer_to(function, question["payload"])
        _set_alarm(0)
        if memory("VmHWM") - before > memory_bytes:
            answer = {"kind": "memory"}
        full = answer["kind"] == "memory" or memory("VmRSS") - base > memory_bytes
        connection.send_bytes(json.dumps({**answer, "full": full}).encode())


def _set_alarm(seconds: float) -> None:
    """Of CPU time, and of wall time WALL times as long; 0 for none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL)


def answer_to(function: Callable[[Any], Any], payload: Any) -> dict[str, Any]:
    try:
        return {"kind": "value", "value": function(payload)}
    except MemoryError:
        return {"kind": "memory"}
    except BaseException as error:
        return {"kind": "raised", "value": describe(error)}


def load(name: str) -> Callable[..., Any]:
    """`module:function` -> the function. Raises ImportError or AttributeError."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]


def memory(field: str) -> int:
    """Of this process, bytes: resident (`VmRSS`), its peak (`VmHWM`), or address space (`VmSize`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
