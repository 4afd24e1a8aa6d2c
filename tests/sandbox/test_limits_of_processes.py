"""What the daemon answers to the kernel's questions before new processes."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from rocstar.sandbox.daemon import watch
from rocstar.sandbox.daemon.watch import Forks, Shortages
from rocstar.sandbox.daemon.worker import Worker
from rocstar.sandbox.walls.cgroups import ControlGroup


async def test_a_question_whose_process_has_ended_needs_no_answer() -> None:
    """The kernel takes it back between the daemon's look at all descriptors and its look at this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks = Forks(os.dup(ours.fileno()), os.getpid())
        forks.begin(4)
        forks.on_asked()  # nothing is to be read
        assert forks.left == 4
        forks.close()


async def test_a_daemon_that_is_busy_with_other_slots_counts_each_of_them_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "tasks", lambda slot: 4)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forks = Forks(os.dup(ours.fileno()), os.getpid())
        forks.begin(4)
        forks.timer = forks.loop.call_at(forks.loop.time() - 0.5, forks.listen)  # other work took half a second
        forks.listen()
        forks.count()
        assert (forks.left, forks.pause >= 5.0) == (0, True)
        forks.begin(4)  # a new call does not wait for what the one before did
        assert (forks.left, forks.pause, forks.late) == (4, watch.PAUSE_SECONDS, 0.0)
        forks.close()


async def test_a_slot_whose_processes_cannot_be_counted_has_no_process_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every kernel lists the children of a process."""
    monkeypatch.setattr(watch, "can_see", lambda pid: False)
    ours, theirs = socket.socketpair()
    with theirs:
        listener = os.dup(theirs.fileno())
        hello: Any = {"slot": os.getpid(), "keeper": os.getpid(), "failed": [], "attached": [listener]}
        worker = Worker(0, ours, hello, ControlGroup(), Shortages())
        assert worker.failed == ("no_memory_cgroup", "no_process_limit")
        assert isinstance(worker.forks, Forks)
        worker.forks.close()
        worker.loop.remove_reader(ours.fileno())
        ours.close()
