"""Trackers beside a run: one process each, which reads the run's folder and ends when the run does.

Process: `rocstar runs track RUN --to NAME --follow`, started by the run's own. Its standard input is the end of a pipe
that nothing is written to: when the run's process closes it or dies, no more steps will come. What it says goes to
`logs/track-NAME-1.txt`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rocstar.record.folder import RunFolder

LAST_SECONDS = 20.0  # for all trackers to send the last steps; then the run ends without them


@contextmanager
def tracked(folder: RunFolder, names: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Follow a run with these trackers. Says which of them failed or were not done in time; never raises for them."""
    started = [(name, *_start(folder, name)) for name in names]
    try:
        yield
    finally:
        until = time.monotonic() + LAST_SECONDS
        for _, child, _ in started:
            assert child.stdin is not None
            child.stdin.close()
        for name, child, log in started:
            _end(name, child, log, until, tell)


def run_goes_on(pipe: IO[bytes]) -> Callable[[float], bool]:
    """For a tracker that a run started: waits so many seconds, or until the run's end of the pipe is closed."""

    def wait(seconds: float) -> bool:
        return not select.select([pipe], [], [], seconds)[0]

    return wait


def _start(folder: RunFolder, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder.next_log(f"track-{name}")
    command = ["-m", "rocstar", "runs", "track", str(folder.path), "--to", name, "--follow"]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C ends the run, and the run ends its trackers
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    return child, log


def _end(name: str, child: subprocess.Popen[bytes], log: Path, until: float, tell: Callable[[str], None]) -> None:
    try:
        code = child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        rest = f"rocstar runs track {log.parents[1]} --to {name}"
        tell(f"{name} had not sent all steps in time; send the rest with: {rest}")
        return
    if code:
        tell(f"{name} failed, which the run did not need; {log} says why")
