"""Counters of all workers, in memory they share: each worker writes its own row and reads everybody's.

Plain numbers in an anonymous shared mapping, made before the workers are forked: no lock, no file, no message.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

from rocstar.sandbox.wire import ProgramOutcome, ServiceOutcome

OUTCOMES = tuple(str(outcome) for outcome in (*ProgramOutcome, *ServiceOutcome))
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the histograms' buckets, seconds; one more takes the rest."""
TIMES = ("queue", "run")
GAUGES = ("waiting", "running", "connections", "ready", "sessions", "session_bytes")
COUNTERS = ("requests", "refused", "disconnects", "cpu_seconds", "starts", "sessions_opened", "cells", "cells_replayed")


def histogram_cells(name: str) -> list[str]:
    return [f"{name}:{number}" for number in range(len(BUCKETS) + 1)] + [f"{name}:sum"]


CELLS = (*GAUGES, *COUNTERS, *OUTCOMES, *(cell for name in TIMES for cell in histogram_cells(name)))
PLACES = {cell: place for place, cell in enumerate(CELLS)}
BYTES = 8  # a double holds every count up to 2**53
Cells = Any  # a memoryview of doubles, which the standard library's types cannot say


class Ledger:
    """One row of doubles per worker."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        shared = memoryview(mmap.mmap(-1, workers * len(CELLS) * BYTES))
        self.cells: Cells = shared.cast("d")

    def row(self, worker: int) -> Row:
        return Row(self.cells[worker * len(CELLS) : (worker + 1) * len(CELLS)])

    def rows(self) -> list[Row]:
        return [self.row(worker) for worker in range(self.workers)]

    def total(self, cell: str) -> float:
        return sum(row[cell] for row in self.rows())


class Row:
    """One worker's counters by name."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def __getitem__(self, cell: str) -> float:
        value: float = self.cells[PLACES[cell]]
        return value

    def __setitem__(self, cell: str, value: float) -> None:
        self.cells[PLACES[cell]] = value

    def add(self, cell: str, amount: float = 1.0) -> None:
        self.cells[PLACES[cell]] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Count one time in the histogram `name`."""
        self.cells[PLACES[f"{name}:0"] + bisect.bisect_left(BUCKETS, seconds)] += 1
        self.cells[PLACES[f"{name}:sum"]] += seconds

    def forget_gauges(self) -> None:
        """A worker that starts again has nothing waiting."""
        for name in GAUGES:
            self[name] = 0.0


def prometheus(ledger: Ledger, facts: Sequence[str]) -> str:
    """All counters in Prometheus' text format. `facts`: further lines."""
    lines = [*facts]
    for name in GAUGES:
        lines += metric(f"rocstar_sandbox_{name}", "gauge", [("", ledger.total(name))])
    for name in COUNTERS:
        lines += metric(f"rocstar_sandbox_{name}_total", "counter", [("", ledger.total(name))])
    by_outcome = [(f'{{outcome="{outcome}"}}', ledger.total(outcome)) for outcome in OUTCOMES]
    lines += metric("rocstar_sandbox_calls_total", "counter", by_outcome)
    for name in TIMES:
        lines += histogram(ledger, name)
    return "\n".join(lines) + "\n"


def metric(name: str, kind: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(f"{name}{labels} {value:.17g}" for labels, value in samples)]


def histogram(ledger: Ledger, name: str) -> list[str]:
    full = f"rocstar_sandbox_{name}_seconds"
    counts = [ledger.total(f"{name}:{number}") for number in range(len(BUCKETS) + 1)]
    lines, reached = [f"# TYPE {full} histogram"], 0.0
    for end, count in zip((*(f"{bucket:g}" for bucket in BUCKETS), "+Inf"), counts, strict=True):
        reached += count
        lines.append(f'{full}_bucket{{le="{end}"}} {reached:.17g}')
    total = ledger.total(f"{name}:sum")
    return [*lines, f"{full}_sum {total:.17g}", f"{full}_count {reached:.17g}"]
