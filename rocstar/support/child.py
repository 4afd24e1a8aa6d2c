"""A child process that runs `main` of a module and ends with its parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

PARENT = "ROCSTAR_PARENT"
PR_SET_PDEATHSIG = 1


def child_command(module: str, *arguments: str) -> list[str]:
    """The command of a child, for the environment of `child_environment`. -P: no types.py of a user hides Python's."""
    return [sys.executable, "-Pm", "rocstar.support.child", module, *arguments]


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and `own`, plus variables by which a child finds this package and its parent."""
    path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return {**os.environ, **own, "PYTHONPATH": path, PARENT: str(os.getpid())}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, for imports of torch and transformers: their million objects all stay, and collecting
    takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_signals_to_parent() -> None:
    """Ctrl-C, SIGTERM and a closed terminal reach the whole process group; the parent decides, and saves first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(arguments: Sequence[str]) -> int:
    """Life of the child."""
    leave_signals_to_parent()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        return 1
    with uncollected():
        module = import_module(arguments[0])
    code: int = module.main(arguments[1:])
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
