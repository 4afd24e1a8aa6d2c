"""A child process that answers one line with one line, under a deadline and a memory limit enforced from outside.

Blocking on purpose, so that it belongs to no event loop; `symbolic.py` calls it from a thread of its own. It knows
nothing of mathematics and it is no sandbox: the child runs our code on the model's text, not the model's code.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_LOOK_SECONDS = 0.1  # between two looks at the child's memory while it works
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class WorkerDied(Exception):
    """The child closed its pipe before it answered."""


class WorkerLate(Exception):
    """No answer before the deadline."""


class WorkerTooBig(Exception):
    """The child's resident memory passed its limit."""


class WorkerProcess:
    """One running child. After any of the three exceptions it must be killed: it may answer an old question."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start `command`. Raises OSError when it cannot be started."""
        # A fixed hash seed makes sympy's choices repeat; other PYTHON* variables must not reach the child. Its own
        # session keeps a Ctrl-C in the terminal away from it: the parent ends it in an orderly way.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment | {"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: bytes, *, seconds: float, memory_bytes: int) -> bytes:
        """Send a line (newline included, at most a pipe buffer) and return the answer line. Empty `line`: only wait.

        Raises WorkerDied, WorkerLate, WorkerTooBig."""
        deadline = time.monotonic() + seconds
        try:
            _pipe(self._process.stdin).write(line)
        except BrokenPipeError as error:
            raise WorkerDied from error
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._next_bytes(deadline, memory_bytes)
        return answer

    def interrupt(self) -> None:
        """End the child only, from any thread: the thread inside `ask` gets WorkerDied and still owns the pipes."""
        self._process.kill()

    def kill(self) -> None:
        """End the child, reap it, close the pipes. Never while another thread is inside `ask`."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _pipe(pipe).close()

    def _next_bytes(self, deadline: float, memory_bytes: int) -> bytes:
        stdout = _pipe(self._process.stdout).fileno()
        poll = select.poll()  # select() would refuse descriptors above 1023, common in a trainer
        poll.register(stdout, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left, _LOOK_SECONDS)):
                if received := os.read(stdout, 65536):
                    return received
                raise WorkerDied
            if _resident_bytes(self.pid) > memory_bytes:
                raise WorkerTooBig
        raise WorkerLate


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # both are asked for in Popen
    return pipe


def _resident_bytes(pid: int) -> int:
    """Resident memory; 0 where the system does not tell (no /proc) or the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
