"""vLLM servers in places of a small Ray: how they are started, begun anew and ended. A stub stands in vLLM's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster import vllm_servers
from rocstar.cluster.places import set_aside
from rocstar.engines.vllm_server import RunningServer
from rocstar.errors import EngineUnavailable
from rocstar.parts.placement import Placed
from tests.engines.test_vllm_server import gone, settings, stub, worker_of

__all__ = ["stub"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SERVERS = [Placed(name="v-0", kind="vllm", asked_by="engine.v.count 1", bytes={})]


@pytest.fixture
def place(two_machines: None) -> Iterator[PlacementGroup]:
    """Of one server."""
    with set_aside({"v": vllm_servers.wish(SERVERS)}) as groups:
        yield groups["v"]


def answers(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


async def test_a_server_has_an_address_a_gpu_of_rays_and_ends_when_it_is_closed(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    server = await vllm_servers.starter(place, SERVERS)(settings(tmp_path, stub, gpus=("7",), place=0), print)
    assert answers(server)
    worker = worker_of(tmp_path / "vllm.log")
    assert psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert server.cpu_seconds() > 0
    await server.close()
    await gone(worker)
    assert not psutil.pid_exists(server.pid)


async def test_after_its_death_another_is_begun_in_the_same_place(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    start = vllm_servers.starter(place, SERVERS)
    first = await start(settings(tmp_path, stub), print)
    psutil.Process(first.pid).kill()
    await first.close()
    second = await start(settings(tmp_path, stub), print)
    assert second.url != first.url and answers(second)
    await second.close()


async def test_a_server_ends_with_its_actor_and_closing_it_then_is_harmless(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    server = await vllm_servers.starter(place, SERVERS)(settings(tmp_path, stub), print)
    spent = server.cpu_seconds()
    ray.kill(server._actor)  # type: ignore[attr-defined]
    await gone(server.pid)
    assert server.cpu_seconds() == spent, "as last heard"
    await server.close()


async def test_why_a_server_did_not_start_is_told_as_on_one_machine(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    (tmp_path / "broken").mkdir()
    with pytest.raises(EngineUnavailable, match=r"vLLM ended with exit code 1 as it started: (.|\n)*no such model"):
        await vllm_servers.starter(place, SERVERS)(settings(tmp_path / "broken", stub), print)
