"""Accounts of CPU seconds: this process by phase, the sandbox's process tree apart."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from rocstar.sandbox.client import SandboxClient

PREFIX = "cpu/"


class Meter:
    """Collects CPU seconds until they are taken into a row of metrics."""

    def __init__(self, sandbox: SandboxClient) -> None:
        self._sandbox = sandbox
        self._sandbox_before = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """All CPU of this process inside the context belongs to `name`."""
        before = time.process_time()
        try:
            yield
        finally:
            self._seconds[name] += time.process_time() - before

    def take(self) -> dict[str, float]:
        """`cpu/<phase>` seconds since the last call, `cpu/sandbox` included."""
        now = self._sandbox.cpu_seconds()
        self._seconds["sandbox"] += now - self._sandbox_before
        self._sandbox_before = now
        taken = {PREFIX + name: round(seconds, 4) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
