"""The child process of the trusted lane: imports the operator's function once, then calls it for ever.

Consumes one JSON line per call on descriptor `fd`: {"payload", "seconds"}. Produces one JSON line there: {"ready"} or
{"failed"} at the start, then {"value"}, {"raised"} or {"memory"} per call, with the largest resident memory so far.
Ends when the parent closes the connection or dies; a call that outlives its seconds by one more is ended by the
kernel's alarm, so a child whose parent died in the middle of a call does not live on. The parent normally kills first.

Not here: any wall against the function. It is the operator's own code, and never the model's.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

BACKSTOP = 4  # address space over resident memory; the parent kills at the latter, this stops one huge allocation
MAX_TEXT = 4000  # characters of a message or traceback sent back
RSS_BYTES = 1024 if sys.platform != "darwin" else 1  # unit of ru_maxrss


def main(fd: int, config: Mapping[str, Any]) -> None:
    connection = socket.socket(fileno=fd)
    os.dup2(2, 1)  # what a library prints must not reach the parent's results
    try:
        function = load(config["target"])
        if config["prepare"]:
            load(config["prepare"])()
    except BaseException as error:
        say(connection, {"failed": told(error)["text"]})
        return
    if peak_bytes() > config["memory_bytes"]:
        say(connection, {"failed": f"importing alone takes {peak_bytes()} of {config['memory_bytes']} bytes"})
        return
    limit_address_space(config["memory_bytes"])
    say(connection, {"ready": True})
    with connection.makefile("rb") as lines:
        for line in lines:
            call = json.loads(line)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, call["seconds"] + 1.0)
            answer = answer_to(function, call["payload"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(answer)


def load(name: str) -> Callable[..., Any]:
    """`module:function` -> the function. Raises ImportError or AttributeError."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def answer_to(function: Callable[[Any], Any], payload: Any) -> bytes:
    """One line. An exception of the function, and a result that is not JSON, are answers too."""
    try:
        return line({"value": function(payload), "peak": peak_bytes()})
    except MemoryError:
        return line({"memory": True})
    except BaseException as error:
        return line({"raised": told(error), "peak": peak_bytes()})


def told(error: BaseException) -> dict[str, str]:
    trace = "".join(traceback.format_exception(error))
    return {
        "type": type(error).__name__,
        "text": f"{type(error).__name__}: {error}"[:MAX_TEXT],
        "trace": trace[-MAX_TEXT:],
    }


def peak_bytes() -> int:
    """Largest resident memory so far. ru_maxrss would be the parent's at first: it survives a vfork and exec."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (FileNotFoundError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_BYTES


def limit_address_space(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = mapped_bytes() + BACKSTOP * memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(hard, soft), hard))


def mapped_bytes() -> int:
    """Address space in use; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def say(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(line(message))


def line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
