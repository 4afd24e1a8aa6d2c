"""CPU and memory of a tree of processes, seen from outside, so that contestants need not be believed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(*pids: int) -> float:
    """CPU of these trees so far, of processes they have reaped included; each process counts in steps of 10 ms."""
    return sum(_cpu_seconds(tree(pid)) for pid in pids)


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def own_megabytes(processes: Iterable[psutil.Process]) -> float:
    """Memory that only these processes hold."""
    return sum(process.memory_full_info().uss for process in processes) / 1e6
