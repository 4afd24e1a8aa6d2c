"""How a failure is told on the command line: its exit code and one sentence. Bugs of ours are told by their traceback.

Not here: the sentences of our own errors, which are written where they are raised.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import rocstar
from rocstar.errors import ConfigError, ContractBroken, DataError, RocstarError, Unavailable

OK = 0
FAILED = 1
USAGE = 2
"""Something the person wrote: command line, recipe or data."""
NOT_READY = 3
"""Something this machine lacks."""
INTERRUPTED = 130
"""Ctrl-C, after a clean save."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def failure(error: Exception) -> tuple[int, str] | None:
    """Exit code and sentence for an error that a person can act on; None for a bug of ours."""
    if isinstance(error, ContractBroken):
        return None
    if isinstance(error, ConfigError | DataError):
        return USAGE, str(error)
    if isinstance(error, Unavailable) or _is_sandbox_down(error):
        return NOT_READY, str(error)
    if isinstance(error, RocstarError):
        return FAILED, str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "rocstar":
        return NOT_READY, f"{error.name} is not installed; install what is missing with: {install_command()}"
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return FAILED, f"the disk is full ({error.filename or 'while writing'}); free some space and try again"
    if isinstance(error, OSError) and error.filename:
        return FAILED, f"{error.filename}: {error.strerror}"
    return None


def install_command() -> str:
    """The pip command that brings every extra a verb may need; from a checkout, the one that pins the tested set."""
    checkout = Path(rocstar.__file__).parent.parent
    if (checkout / "constraints" / "cpu.txt").is_file():
        return f"cd {checkout} && pip install -c constraints/cpu.txt -e '.[train]'"
    return "pip install 'rocstar[train]'"


def flush_results() -> None:
    """Now, so that a full disk is told by us and not by the interpreter as it shuts down."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough; without this the shutdown would try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_sandbox_down(error: Exception) -> bool:
    # sandbox/ stands alone, so its error is no RocstarError; where it was never loaded it was never raised.
    wire = sys.modules.get("rocstar.sandbox.wire")
    return wire is not None and isinstance(error, wire.SandboxDown)
