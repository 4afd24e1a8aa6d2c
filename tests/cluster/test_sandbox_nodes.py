"""Sandbox services as actors of a small Ray instance on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")

from rocstar.cluster import actors
from rocstar.cluster.places import PlaceRequest, reserved
from rocstar.config.places import SandboxSection
from rocstar.sandbox.call import Call, Limits, ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAP = Call(id="x", code="import time; time.sleep(0.3); 7", limits=Limits(wall_seconds=20.0))


@pytest.fixture(scope="module")
def placed(two_machines: None) -> Iterator[tuple[SandboxClient, ExitStack]]:
    """A client of two services, and what ends them."""
    with reserved({"nodes": PlaceRequest("sandbox_nodes 2", [{"CPU": 1.0}] * 2)}) as groups, ExitStack() as stack:
        settings = SandboxSection(slots=2, preload=[])
        yield stack.enter_context(actors.sandbox_services(settings, 2, groups["nodes"])), stack


def services(client: SandboxClient) -> list[psutil.Process]:
    ports = [f"--port={node.label.rpartition(':')[2]}" for node in client.nodes]
    running = [(each, each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    return [each for each, words in running if any(port in words for port in ports)]


async def with_a_death(client: SandboxClient, service: psutil.Process) -> list[Response]:
    """Twenty calls, one service killed among them; then once more, when it is back."""
    calls = [asyncio.ensure_future(client.run(NAP)) for _ in range(20)]
    await asyncio.sleep(0.5)
    service.kill()
    responses = await asyncio.gather(*calls)
    async with asyncio.timeout(60):
        while not all(node.up for node in client.nodes):  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.1)
    return [*responses, await client.run(NAP)]


def test_services_are_used_directly_and_one_that_dies_loses_nothing_and_comes_back(
    placed: tuple[SandboxClient, ExitStack],
) -> None:
    client, _ = placed
    assert client.info().slots == 4
    responses = asyncio.run(with_a_death(client, services(client)[0]))
    assert {(response.outcome, response.value) for response in responses} == {(ProgramOutcome.OK, "7")}
    assert {response.attempt for response in responses} == {1, 2}


def test_services_end_with_the_context(placed: tuple[SandboxClient, ExitStack]) -> None:
    client, stack = placed
    running = services(client)
    assert len(running) == 2
    stack.close()
    _, alive = psutil.wait_procs(running, timeout=60)
    assert not alive
