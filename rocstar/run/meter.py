"""Seconds of a run by phase: wall time, CPU seconds of this process, and of the sandbox separately. Also reports the
beginning and end of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rocstar.sandbox.client import SandboxClient

CPU, WALL = "cpu/", "seconds/"


class Meter:
    """Collects seconds until they are taken into a row of metrics."""

    def __init__(self, sandbox: SandboxClient, note: Callable[[str | None], None] = lambda phase: None) -> None:
        """note: called with each phase as it begins, and with None at its end."""
        self._sandbox, self._note = sandbox, note
        self._before = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._wall: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """All time inside the context, and all CPU of this process, belongs to `name`."""
        before, began = time.process_time(), time.monotonic()
        self._note(name)
        try:
            yield
        finally:
            self._note(None)
            self._seconds[name] += time.process_time() - before
            self._wall[name] += time.monotonic() - began

    def take(self) -> dict[str, float]:
        """`cpu/<phase>` seconds since the last call, `cpu/sandbox` among them, and `seconds/<phase>` of wall time."""
        now = self._sandbox.usage().cpu_seconds
        self._seconds["sandbox"] += now - self._before
        self._before = now
        taken = {CPU + name: round(seconds, 4) for name, seconds in self._seconds.items()}
        taken |= {WALL + name: round(seconds, 4) for name, seconds in self._wall.items()}
        self._seconds.clear()
        self._wall.clear()
        return taken
