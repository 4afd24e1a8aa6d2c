"""Bare Python, quickly: an interpreter that has some modules loaded and runs each program in a fork of itself, or, when
asked to, in a new interpreter. For `sandbox_code.py`, which starts it; not part of the sandbox, and no wall around it.

    python -P -s bare_python.py MODULE...

A line of its input is a JSON list: file of the program, empty folder to run it in, CPU and wall seconds, whether in a
new interpreter. It answers with the status of `os.waitpid`; what the program printed lies in `out` and `err` beside it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from types import ModuleType


def main() -> str:
    """In the fork that is to run it: the file of a program. Empty when there is none left."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # or each program's last collection copies the memory of all of them
    while line := sys.stdin.readline():
        path, folder, cpu_seconds, wall_seconds, new = json.loads(line)
        if not (pid := os.fork()):
            prepare(path, folder, cpu_seconds)
            if new:
                os.execv(sys.executable, [sys.executable, "-P", "-s", path])
            return str(path)
        print(wait(pid, wall_seconds), flush=True)
    return ""


def prepare(path: str, folder: str, cpu_seconds: int) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ["HOME"] = folder
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    beside = os.path.dirname(path)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for standard, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{beside}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), standard)
    os.closerange(3, 64)


def wait(pid: int, wall_seconds: int) -> int:
    """For it; what it started ends with it."""

    def kill(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(wall_seconds)
    status = os.waitpid(pid, 0)[1]
    signal.alarm(0)
    kill()
    return status


if __name__ == "__main__" and (FILE := main()):
    sys.argv = [FILE]
    sys.modules["__main__"] = MODULE = ModuleType("__main__")
    MODULE.__dict__.update(__file__=FILE, __annotations__={}, __cached__=None, __builtins__=__builtins__)
    with open(FILE, "rb") as SOURCE:
        CODE = compile(SOURCE.read(), FILE, "exec", dont_inherit=True)
    exec(CODE, MODULE.__dict__)
