"""A machine that cannot start another process: the sandbox waits for room, and loses nothing meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rocstar.sandbox import groups, nursery
from rocstar.sandbox.client import SandboxClient
from tests.sandbox.support import eventually, run


@pytest.fixture
def crowded() -> Iterator[Path]:
    """A group in which the number of processes can be limited."""
    found = groups.found()
    if "pids" not in found.folders:
        pytest.skip("a full machine needs a group that counts processes")
    group = found.folders["pids"] / "crowded"
    group.mkdir()
    yield group
    found.close()


async def test_a_nursery_that_cannot_fork_waits_and_its_calls_are_answered(
    own_client: SandboxClient, crowded: Path
) -> None:
    assert (await run(own_client, "1")).value == "1"
    preloaded = psutil.Process(own_client.process.pid).children()[0]
    slot = preloaded.children()[0]
    (crowded / "cgroup.procs").write_text(str(preloaded.pid))
    (crowded / "pids.max").write_text("1")
    slot.kill()
    task = asyncio.ensure_future(run(own_client, "2"))
    refused = crowded / "pids.events"
    assert await asyncio.to_thread(eventually, lambda: refused.read_text().strip() != "max 0")
    assert not task.done()
    (crowded / "pids.max").write_text("max")
    response = await task
    assert (response.value, preloaded.is_running()) == ("2", True)


def test_a_refusal_goes_to_the_host_and_the_descriptor_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        nursery.refuse(theirs.detach(), BlockingIOError(11, "Resource temporarily unavailable"))
        said = ours.recv(1000)
        assert ours.recv(1) == b""
    hello = json.loads(said[nursery.HELLO.size :])
    assert hello["busy"] is True
    assert "could not fork" in hello["problem"]
    assert os.strerror(11) in hello["problem"]
