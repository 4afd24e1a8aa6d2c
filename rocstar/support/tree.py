"""Runs a command and kills all of its descendants, in other sessions too: when the command ends, on SIGTERM, and when
its starter ends, even by SIGKILL. Imports nothing of rocstar.

Not covered: what was given another user's rights, and an end of this process itself by SIGKILL. Source: ours."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def command(*words: str) -> tuple[str, ...]:
    """The command that runs these words under this module."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *words)


def main(starter: str, *words: str) -> None:
    signal.signal(signal.SIGTERM, end)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(starter):
        run(*words)
    end()


def run(*words: str) -> None:
    """Returns when it has ended."""
    if child := os.fork():
        while os.wait()[0] != child:
            pass
        return
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def end(*_: Any) -> NoReturn:
    """Kill all descendants; children of a killed process become ours, whatever their session."""
    ended = True
    while ended:
        ended = False
        for process in children():
            with suppress(PermissionError, ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                ended = True
        with suppress(ChildProcessError):
            ended and os.wait()
    os._exit(0)


def children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
