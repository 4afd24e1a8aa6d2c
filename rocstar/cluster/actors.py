"""The processes that Ray places, each an actor: learner ranks above 0, vLLM servers, sandbox services. Their data does
not pass through Ray.

A run whose rank died ends, and a person resumes it. An engine decides when to start its server again, as on one machine
(`VllmEngine.restart`). A service that dies is restarted at its address; a lost machine is not replaced.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster import places
from rocstar.cluster.places import LOOPBACK, PlaceRequest, at, end_with_ray, gpus, own_address, sentence
from rocstar.config.places import ClusterSection, SandboxSection
from rocstar.config.sections import ModelSection, Recipe
from rocstar.engines.vllm_server import START_SECONDS as SERVER_START_SECONDS
from rocstar.engines.vllm_server import StartServer, VllmServer, VllmSettings
from rocstar.errors import ConfigError, EngineUnavailable, RocstarError, Unavailable
from rocstar.sandbox.call import SandboxDown
from rocstar.sandbox.client import SandboxClient
from rocstar.support.threads import quiet_torch

if TYPE_CHECKING:
    from rocstar.learning.ranks import Ranks
    from rocstar.parts.placement import Placed, Placement

LEARNERS, SERVERS, SANDBOXES = "learners", "servers", "sandboxes"
RANK_END_SECONDS = 10.0
SERVER_END_SECONDS = 40.0  # more than a server's orderly shutdown takes
REPORT_SECONDS = 1.0  # for Ray to deliver an error to rank 0
PINNED = 0.001  # of the resource `node:ADDRESS`, of which each machine has 1: places a bundle on that machine
SLOTS_PER_CORE = 4  # a service reserves one core per this many slots


def place_requests(recipe: Recipe, placement: Placement, driver: str = LOOPBACK) -> Mapping[str, PlaceRequest]:
    """The places to reserve: for each rank, rank 0's on the machine with the address `driver`, for each server, and for
    each sandbox service, these on as many machines as possible."""
    nodes, learners, servers = recipe.cluster.sandbox_nodes, placement.learners, placement.servers
    found: dict[str, PlaceRequest] = {}
    if len(learners) > 1 or any(learner.needs for learner in learners):
        bases = [{f"node:{driver}": PINNED}, *[{"CPU": 1.0}] * (len(learners) - 1)]
        ranks = [{**base, **gpus(learner.needs)} for base, learner in zip(bases, learners, strict=True)]
        found[LEARNERS] = PlaceRequest(learners[0].asked_by, ranks)
    if servers and not shares_gpus(placement):
        asked_by = " and ".join(dict.fromkeys(server.asked_by for server in servers))
        rooms = [{"CPU": float(server.threads), **gpus(server.needs)} for server in servers]
        found[SERVERS] = PlaceRequest(asked_by, rooms)
    if nodes:
        each = {"CPU": cores_of(recipe.sandbox.slots)}
        found[SANDBOXES] = PlaceRequest(f"cluster.sandbox_nodes {nodes}", [each] * nodes, "SPREAD")
    return found


def shares_gpus(placement: Placement) -> bool:
    """Whether servers run on the GPUs that Ray has assigned to learners."""
    return placement.colocate and any(server.needs for server in placement.servers)


class LearnerActor:
    """A learner rank, with the same lifetime as one started by torchrun."""

    def __init__(self, folder: str) -> None:
        """folder: rank 0's working directory, on a file system that all machines share: checkpoint paths may be
        relative to it. Raises OSError if it does not exist."""
        end_with_ray()  # also if rank 0 is unreachable, whose connections then stay open
        os.chdir(folder)
        quiet_torch()  # before torch is loaded; rank 0 sends the number of threads later
        from rocstar.learning.ranks import serve_rank

        self.serve_rank = serve_rank

    def address(self) -> str:
        """The address of its machine."""
        return own_address()

    def serve(self, variables: Mapping[str, str]) -> None:
        """Serve rank 0 until it ends. Raises RunHalted when it is gone."""
        try:
            self.serve_rank(variables)
        finally:
            # The exit closes our connections, which other ranks notice; rank 0 receives an error before that.
            threading.Timer(REPORT_SECONDS, os._exit, (1,)).start()


class RayRank:
    """A rank above 0, as `rocstar.learning.ranks.StartedRank`."""

    def __init__(self, actor: Any, group: PlacementGroup, variables: Mapping[str, str]) -> None:
        self.actor, self.group = actor, group
        self.life = actor.serve.remote(variables)

    def ended(self, seconds: float) -> str | None:
        try:
            ray.get(self.life, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return f"ended: {sentence(error)}"
        return "ended"

    def end(self) -> None:
        """End all ranks, with their placement group."""
        places.release(self.group)
        self.ended(RANK_END_SECONDS)


def start_ranks(
    cluster: ClusterSection,
    model: ModelSection,
    environment: Mapping[str, str],
    group: PlacementGroup,
    learners: Sequence[Placed],
) -> Ranks:
    """As `rocstar.cluster.start_ranks`, in the places of `place_requests`. Raises ConfigError if the GPU that Ray
    assigns to this process is not visible here, Unavailable if Ray fails."""
    from rocstar.learning.models import device_of
    from rocstar.learning.ranks import Ranks, lead

    try:
        own_gpu = _own_gpu(group, environment) if learners[0].needs else 0
        if cluster.learners == 1 and not cluster.offload_optimizer:
            alone = Ranks()
            alone.local_rank = own_gpu
            return alone
        actor: Any = ray.remote(LearnerActor)
        actors = [
            actor.options(**at(group, rank, cpus=1, gpus=learner.needs)).remote(os.getcwd())
            for rank, learner in enumerate(learners[1:], start=1)
        ]
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=places.START_SECONDS)

        def begin(variables: Mapping[str, str]) -> RayRank:
            return RayRank(actors[int(variables["RANK"]) - 1], group, variables)

        host = LOOPBACK if set(addresses) <= {own_address()} else own_address()
        indices = [own_gpu, *[0] * len(actors)]  # an actor sees only its own GPU
        device, offload = device_of(model).type, cluster.offload_optimizer
        return lead(cluster.learners, device, begin, offload=offload, host=host, gpus=indices)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Unavailable(f"Ray did not start the learner ranks: {sentence(error)}") from error


def _own_gpu(group: PlacementGroup, environment: Mapping[str, str]) -> int:
    """Index, among the visible GPUs, of the one reserved for rank 0. Raises ConfigError."""
    gpu_ids: Any = ray.remote(lambda: ray.get_gpu_ids())
    (found,) = ray.get(gpu_ids.options(**at(group, 0, gpus=1)).remote(), timeout=places.START_SECONDS)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(found)
    if str(found) not in visible.split(","):
        raise ConfigError(f"Ray lends GPU {found} to rank 0, but CUDA_VISIBLE_DEVICES is {visible}; unset it")
    return visible.split(",").index(str(found))


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
            async with asyncio.timeout(SERVER_START_SECONDS):
                self.url, self.pid = await self._actor.start.remote(settings, own_address())
        except TimeoutError:
            raise EngineUnavailable(f"Ray did not start a vLLM server within {SERVER_START_SECONDS:.0f} s") from None
        except ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RocstarError):
                raise cause from None
            raise EngineUnavailable(f"Ray did not start a vLLM server: {sentence(error)}") from error

    async def close(self) -> None:
        with suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(SERVER_END_SECONDS):
                await self._actor.close.remote()
        ray.kill(self._actor)


def server_starter(
    group: PlacementGroup | None, placement: Placement, shared: Sequence[tuple[str, str]] = ()
) -> StartServer:
    """Starts each server in its place of `place_requests`; an engine frees its place before a restart. shared: machine
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


class NodeActor:
    """Keeps one service running on the actor's machine; the service ends with the actor."""

    def __init__(self, token: str, options: Sequence[str]) -> None:
        end_with_ray()
        self._host = own_address()
        with socket.create_server((self._host, 0)) as free:
            self._port = free.getsockname()[1]
        serve = [sys.executable, "-Pm", "rocstar", "sandbox", "serve", f"--host={self._host}", f"--port={self._port}"]
        self._command, self._environment = [*serve, *options], {**os.environ, "ROCSTAR_SANDBOX_TOKEN": token}
        threading.Thread(target=self._keep, daemon=True).start()

    def address(self) -> str:
        """The address of the service, once it listens there."""
        while True:
            with suppress(OSError), socket.create_connection((self._host, self._port)):
                return f"http://{self._host}:{self._port}"
            time.sleep(0.1)

    def _keep(self) -> None:
        while True:
            end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            subprocess.run(self._command, env=self._environment, preexec_fn=end_with_parent)
            time.sleep(1.0)  # between tries of a service that cannot start


def cores_of(slots: int) -> float:
    """Cores that a service reserves."""
    return max(1.0, slots / SLOTS_PER_CORE)


@contextmanager
def sandbox_services(settings: SandboxSection, nodes: int, group: PlacementGroup) -> Iterator[SandboxClient]:
    """A client of `nodes` services with these settings, in the places of `place_requests`; they end with the context.
    Raises SandboxDown if one fails."""
    token, level, cores = secrets.token_hex(16), settings.min_isolation, cores_of(settings.slots)
    options = [f"--slots={settings.slots}", f"--preload={','.join(settings.preload)}", f"--min-isolation={level}"]
    actor: Any = ray.remote(NodeActor).options(**at(group, cpus=cores))
    actors = [actor.remote(token, options) for _ in range(nodes)]
    with ExitStack() as ends:
        for each in actors:
            ends.callback(ray.kill, each)
        try:
            addresses = ray.get([each.address.remote() for each in actors], timeout=places.START_SECONDS)
        except ray.exceptions.RayError as error:
            need = f"{nodes} nodes of {settings.slots} slots need {nodes * cores:g} cores; each logs why"
            raise SandboxDown(f"Ray did not start the sandbox nodes ({need}): {sentence(error)}") from error
        with SandboxClient.connect(addresses, token=token, min_isolation=level) as client:
            yield client
