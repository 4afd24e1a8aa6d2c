"""Seconds of a run by phase: wall time, CPU seconds of this process, and of other processes separately. Also reports
the beginning and end of each phase."""

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
        self._others = {"sandbox": sandbox.cpu_seconds}
        self._note = note
        self._before: defaultdict[str, float] = defaultdict(float)
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

    def watch(self, name: str, seconds: Callable[[], float]) -> None:
        """Count other processes too; `seconds` returns their CPU time so far."""
        self._others[name] = seconds

    def take(self) -> dict[str, float]:
        """`cpu/<phase>` seconds since the last call, those of other processes included, and `seconds/<phase>` of wall
        time."""
        for name, used in self._others.items():
            now = used()
            self._seconds[name] += now - self._before[name]
            self._before[name] = now
        taken = {CPU + name: round(seconds, 4) for name, seconds in self._seconds.items()}
        taken |= {WALL + name: round(seconds, 4) for name, seconds in self._wall.items()}
        self._seconds.clear()
        self._wall.clear()
        return taken
