"""A machine that cannot start another process: the sandbox waits for room, and loses nothing meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox.walls import cgroups
from tests.sandbox.driver import Daemon, eventually


@pytest.fixture
def crowded() -> Iterator[Path]:
    """A group in which the number of processes can be limited."""
    found = cgroups.found()
    if "pids" not in found.folders:
        pytest.skip("a full machine needs a group that counts processes")
    group = found.folders["pids"] / "crowded"
    group.mkdir()
    yield group
    found.close()


def test_a_zygote_that_cannot_fork_waits_and_its_calls_are_answered(crowded: Path) -> None:
    with Daemon(slots=1) as daemon:
        running = daemon.begin()
        (zygote,) = daemon.zygotes()
        (crowded / "cgroup.procs").write_text(str(zygote.pid))
        (crowded / "pids.max").write_text("1")
        daemon.slots()[0].kill()
        assert daemon.answer(running).outcome == "internal"
        number = daemon.submit("2")
        refused = crowded / "pids.events"
        assert eventually(lambda: refused.read_text().strip() != "max 0")
        (crowded / "pids.max").write_text("max")
        assert (daemon.answer(number).value, zygote.is_running()) == ("2", True)
