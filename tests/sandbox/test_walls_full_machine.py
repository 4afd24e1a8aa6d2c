"""A machine that cannot start another process: the sandbox waits for room, and loses nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.walls import cgroups
from tests.sandbox.support import at_depth, eventually, run, slot_processes


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


async def test_a_zygote_that_cannot_fork_waits_and_its_calls_are_answered(crowded: Path) -> None:
    with SandboxClient.start(slots=1, preload=()) as client:
        assert (await run(client, "1")).value == "1"
        (zygote,) = at_depth(client, 1)
        (crowded / "cgroup.procs").write_text(str(zygote.pid))
        (crowded / "pids.max").write_text("1")
        slot_processes(client)[0].kill()
        task = asyncio.ensure_future(run(client, "2"))
        refused = crowded / "pids.events"
        assert await asyncio.to_thread(eventually, lambda: refused.read_text().strip() != "max 0")
        assert not task.done()
        (crowded / "pids.max").write_text("max")
        response = await task
        assert (response.value, zygote.is_running()) == ("2", True)
