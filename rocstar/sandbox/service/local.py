"""A service of one's own for as long as a command or a test needs it: `rocstar sandbox serve` on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rocstar.sandbox.wire import SandboxDown

CLOSE_SECONDS = 30.0


class LocalService:
    """A running `rocstar sandbox serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> int:
        """Drain it; its exit code."""
        self.process.terminate()
        return self.process.wait(CLOSE_SECONDS)


def start(options: Sequence[str] = ()) -> LocalService:
    """Raises SandboxDown with the service's own words when it does not come up."""
    command = [sys.executable, "-m", "rocstar", "sandbox", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    told = process.stderr.readline()
    found = re.search(r"http://\S+", told)
    if found is None:
        told += process.communicate()[1]
        raise SandboxDown(told.strip() or f"the sandbox service ended with code {process.returncode} and no word")
    return LocalService(process, found[0])


@contextmanager
def local_service(options: Sequence[str] = ()) -> Iterator[str]:
    """Its URL."""
    service = start(options)
    try:
        yield service.url
    finally:
        service.stop()
