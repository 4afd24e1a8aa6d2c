"""vLLM servers placed by Ray. Requests do not pass through Ray: an engine receives the server's address.

An actor starts its server and ends it; the engine decides when to start another, as on one machine
(`VllmEngine.restart`), so this module restarts none. A server ends with its actor, and the actor with the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster.places import LOOPBACK, PlaceRequest, at, end_with_ray, gpus, own_address, sentence
from rocstar.engines.vllm_server import START_SECONDS, StartServer, VllmServer, VllmSettings
from rocstar.errors import EngineUnavailable, RocstarError

if TYPE_CHECKING:
    from rocstar.parts.placement import Placed, Placement

END_SECONDS = 40.0  # more than a server's orderly shutdown takes


class ServerActor:
    """Owns one server, from `start` to `close`."""

    def __init__(self) -> None:
        end_with_ray()
        self._server: VllmServer | None = None

    async def start(self, settings: VllmSettings, driver: str) -> tuple[str, int]:
        """The server's address, on loopback if the driver is on this machine too, and its process id."""
        host = LOOPBACK if own_address() == driver else own_address()
        self._server = await VllmServer.start(replace(settings, host=host))
        return self._server.url, self._server.pid

    async def close(self) -> None:
        if self._server:
            await self._server.close()


class RayServer:
    """A server in a place that Ray chose, as `engines.vllm_server.RunningServer`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.url, self.pid = "", 0

    async def start(self, settings: VllmSettings) -> None:
        """Raises ConfigError, EngineUnavailable."""
        try:
            async with asyncio.timeout(START_SECONDS):
                self.url, self.pid = await self._actor.start.remote(settings, own_address())
        except TimeoutError:
            raise EngineUnavailable(f"Ray did not start a vLLM server within {START_SECONDS:.0f} s") from None
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RocstarError):
                raise cause from None
            raise EngineUnavailable(f"Ray did not start a vLLM server: {sentence(error)}") from error

    async def close(self) -> None:
        with suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._actor.close.remote()
        ray.kill(self._actor)


def place_request(servers: Sequence[Placed]) -> PlaceRequest:
    """A place for each server of a recipe, with its GPUs."""
    places = [{"CPU": float(server.threads), **gpus(server.needs)} for server in servers]
    return PlaceRequest(" and ".join(dict.fromkeys(server.asked_by for server in servers)), places)


def starter(group: PlacementGroup | None, placement: Placement, shared: Sequence[tuple[str, str]] = ()) -> StartServer:
    """Starts each server in its place of `place_request`; an engine frees its place before a restart. shared: machine
    and GPU of each learner's place, if servers and learners take turns on them. Raises ConfigError if several GPUs of
    a server are not on one machine."""
    actor: Any = ray.remote(ServerActor)
    servers = placement.servers
    if shared:
        machines = {machine: tuple(gpu for at, gpu in shared if at == machine) for machine, _ in shared}
        servers = replace(placement, processes=servers).on(machines).servers

    async def start(settings: VllmSettings) -> RayServer:
        assert group is not None, "no place was reserved for a server"
        placed = servers[settings.place]
        if shared:  # Ray has assigned the GPUs to a learner, so the settings name them
            options = at(group, shared.index((placed.machine, placed.gpus[0])))
        else:
            options = at(group, settings.place, cpus=settings.threads, gpus=placed.needs)
        server = RayServer(actor.options(**options).remote())
        try:
            await server.start(replace(settings, gpus=placed.gpus if shared else ()))  # (): those that Ray assigns
        except BaseException:
            await server.close()
            raise
        return server

    return start
