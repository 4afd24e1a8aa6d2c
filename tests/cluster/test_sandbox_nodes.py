"""Sandbox nodes as actors of a small Ray instance on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")

import ray

from rocstar.cluster.sandbox_nodes import RaySandbox
from rocstar.sandbox.wire import Limits, ProgramOutcome, Response, SandboxDown
from tests.sandbox_router.support import answer, is_alive, sleeper, until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def instance() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_actors_serve_and_the_death_of_one_loses_nothing(instance: None) -> None:
    with RaySandbox.start(nodes=2, slots=2, preload=()) as sandbox:
        assert sandbox.info().slots == 4
        pids = ray.get([actor.pid.remote() for actor in sandbox.actors])
        responses = asyncio.run(with_a_death(sandbox, pids[0]))
    assert {response.outcome for response in responses} == {ProgramOutcome.OK}
    assert [response.stdout for response in responses] == [answer(number) for number in range(len(responses))]
    assert {response.attempt for response in responses} == {1, 2}
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


async def with_a_death(sandbox: RaySandbox, pid: int) -> list[Response]:
    """60 calls, one node killed among them; returns when Ray has brought it back."""
    await sandbox.router.wait_for_nodes(2, seconds=30.0)
    calls = [asyncio.create_task(sandbox.run(sleeper(number, 0.1))) for number in range(60)]
    await asyncio.sleep(0.4)
    os.kill(pid, signal.SIGKILL)
    responses = await asyncio.gather(*calls)
    await until(lambda: sum(node.connected for node in sandbox.nodes()) == 2, seconds=60.0)
    return list(responses)


def test_a_session_goes_on_when_its_actors_node_is_killed(instance: None) -> None:
    with RaySandbox.start(nodes=2, slots=2, preload=()) as sandbox:
        assert asyncio.run(session_with_a_death(sandbox)) == ["21", "22"]


async def session_with_a_death(sandbox: RaySandbox) -> list[str | None]:
    """The values of two cells, one before and one after."""
    await sandbox.router.wait_for_nodes(2, seconds=30.0)
    async with sandbox.open_session(limits=Limits(wall_seconds=20.0), seed=1) as session:
        await session.run("x = 20")
        before = await session.run("x += 1; x")
        pids = await asyncio.to_thread(ray.get, [actor.pid.remote() for actor in sandbox.actors])
        labels = await asyncio.to_thread(ray.get, [actor.label.remote() for actor in sandbox.actors])
        os.kill(dict(zip(labels, pids, strict=True))[before.node], signal.SIGKILL)
        after = await session.run("x += 1; x")
        assert after.replayed_cells == 2  # on either node: Ray may have brought the killed one back by then
        return [before.value, after.value]


def test_a_node_that_cannot_start_is_told(instance: None) -> None:
    with pytest.raises(SandboxDown, match="no_such_module"):
        RaySandbox.start(nodes=1, slots=1, preload=("no_such_module",))
