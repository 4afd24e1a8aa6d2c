"""vLLM servers in places of a small Ray: how they are started, begun anew and ended. A stub stands in vLLM's place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("ray", reason="needs the extra [cluster]")

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster.actors import place_requests, server_starter
from rocstar.cluster.places import PlaceRequest, assigned_gpus, reserved
from rocstar.config.sections import Recipe
from rocstar.engines.vllm_server import RunningServer
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.parts.placement import NOWHERE, Placed
from tests.engines.test_vllm_server import gone, settings, stub, worker_of

__all__ = ["stub"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SERVERS = [Placed(name="v-0", kind="vllm", asked_by="engine.v.count 1", bytes={})]
TABLE = replace(NOWHERE, processes=SERVERS)


@pytest.fixture
def place(two_machines: None) -> Iterator[PlacementGroup]:
    """Of one server."""
    with reserved(place_requests(Recipe(), TABLE)) as groups:
        yield groups["servers"]


def answers(server: RunningServer) -> bool:
    return httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


async def test_a_server_has_an_address_a_gpu_of_rays_and_ends_when_it_is_closed(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    server = await server_starter(place, TABLE)(settings(tmp_path, stub, gpus=("7",), place=0))
    assert answers(server)
    worker = worker_of(tmp_path / "vllm.log")
    assert psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    await server.close()
    await gone(worker)
    assert not psutil.pid_exists(server.pid)


async def test_after_its_death_another_is_begun_in_the_same_place(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    start = server_starter(place, TABLE)
    first = await start(settings(tmp_path, stub))
    psutil.Process(first.pid).kill()
    await first.close()
    second = await start(settings(tmp_path, stub))
    assert second.url != first.url and answers(second)
    await second.close()


async def test_a_server_ends_with_its_actor_and_closing_it_then_is_harmless(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    server = await server_starter(place, TABLE)(settings(tmp_path, stub))
    ray.kill(server._actor)  # type: ignore[attr-defined]
    await gone(server.pid)
    await gone(worker_of(tmp_path / "vllm.log"))
    await server.close()


async def test_why_a_server_did_not_start_is_told_as_on_one_machine(
    place: PlacementGroup, tmp_path: Path, stub: Path
) -> None:
    (tmp_path / "broken").mkdir()
    with pytest.raises(EngineUnavailable, match=r"vLLM ended with exit code 1 as it started: (.|\n)*no such model"):
        await server_starter(place, TABLE)(settings(tmp_path / "broken", stub))


async def test_servers_that_take_turns_run_on_the_gpus_that_learners_were_lent(
    two_machines: None, tmp_path: Path, stub: Path
) -> None:
    """Ray counts a GPU as taken by its learner alone; two GPUs of a server are of one machine."""
    rank = Placed(name="learner-0", kind="learner", asked_by="cluster.learners 2", bytes={})
    wide = replace(SERVERS[0], needs=2)
    with reserved({"learners": PlaceRequest("cluster.learners 2", [{"GPU": 1.0}] * 2)}) as groups:
        lent = assigned_gpus(groups["learners"])
        assert sorted(gpu for _, gpu in lent) == ["0", "1"]
        table = replace(TABLE, processes=[rank, replace(rank, name="learner-1"), wide], colocate=True)
        start = server_starter(groups["learners"], table, lent)
        server = await start(settings(tmp_path, stub, gpus=("7", "8"), place=0))
        assert answers(server)
        assert psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] == ",".join(gpu for _, gpu in lent)
        await server.close()
    with pytest.raises(ConfigError, match="need 2 GPUs and there are 1 on a and 1 on b"):
        server_starter(None, table, [("a", "0"), ("b", "0")])
