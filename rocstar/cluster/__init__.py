"""The machines of a run: processes that it starts besides its own, here or where Ray, an extra that only this room
imports, places them (`[cluster]`). The sandbox is started before torch is loaded, while this process is small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocstar.errors import ConfigError, RocstarError, RunHalted
from rocstar.sandbox.client import SandboxClient
from rocstar.support.child import child_command, child_environment
from rocstar.support.exits import need
from rocstar.support.processes import how_ended

if TYPE_CHECKING:
    from rocstar.config.places import ClusterSection, SandboxSection
    from rocstar.config.sections import ModelSection, Recipe
    from rocstar.engines.vllm_server import StartServer
    from rocstar.learning.ranks import Ranks
    from rocstar.parts.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    sandbox: SandboxClient
    """Runs programs."""
    start_ranks: Callable[[], Ranks]
    """Start the learners. Raises ConfigError, Unavailable."""
    start_server: StartServer
    """Start a vLLM server."""
    engines_share_memory: bool
    """Whether all engines can read this machine's shared memory (/dev/shm)."""
    host: str = "127.0.0.1"
    """Address of this machine for engines."""


@contextmanager
def opened_machines(recipe: Recipe, proof: Path, placement: Placement, *, calls: bool = True) -> Iterator[Machines]:
    """Machines for a recipe, for the duration of the context. proof: a file in the folder that engines and learners
    read from; every machine must see it with the same content. placement: the processes on each GPU. calls: whether
    anything calls the sandbox; if not, none is started but by Ray. Raises ConfigError if Ray lacks room or a machine
    lacks the file, Unavailable if Ray fails, SandboxDown."""
    needs_places = placement.learners or placement.servers or recipe.cluster.sandbox_nodes
    if recipe.cluster.launcher == "processes" or not needs_places:
        from rocstar.engines.vllm_server import VllmServer

        ranks = partial(start_ranks, recipe.cluster, recipe.model, os.environ, placement.local_ranks)
        with started_sandbox(recipe.sandbox, calls=calls) as sandbox:
            yield Machines(sandbox=sandbox, start_ranks=ranks, start_server=VllmServer.start, engines_share_memory=True)
        return
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        # A Ray of this run's own listens on loopback only. The only setting for that is meant for other systems, and
        # is read when Ray is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    with _placed(recipe, proof, placement) as machines:
        yield machines


@contextmanager
def _placed(recipe: Recipe, proof: Path, placement: Placement) -> Iterator[Machines]:
    """As `opened_machines`: places for all processes are reserved in one Ray cluster before any starts."""
    from rocstar.cluster import actors, places

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError('torchrun has started the learners already; leave it out or set cluster.launcher "processes"')
    with ExitStack() as stack:
        nodes = recipe.cluster.sandbox_nodes
        child = None if nodes else stack.enter_context(started_sandbox(recipe.sandbox))
        requests = partial(actors.place_requests, recipe, placement)
        stack.enter_context(places.connected(places.needed(requests().values()).get("CPU", 0)))
        if placement.gpu_bytes:
            placement.on(places.gpus_of_machines())
        groups = stack.enter_context(places.reserved(requests(places.own_address())))
        for name in {actors.LEARNERS, actors.SERVERS} & groups.keys():
            places.refuse_unshared(groups[name], proof)
        shared = actors.shares_gpus(placement)
        at = groups.get(actors.LEARNERS)
        start = partial(actors.start_ranks, group=at, learners=placement.learners) if at else start_ranks
        servers_at = groups.get(actors.LEARNERS if shared else actors.SERVERS)
        lent = places.assigned_gpus(groups[actors.LEARNERS]) if shared else ()
        is_local = not (placement.servers and servers_at) or places.are_here(servers_at)
        services = partial(actors.sandbox_services, recipe.sandbox, nodes)
        yield Machines(
            sandbox=child or stack.enter_context(services(groups[actors.SANDBOXES])),
            start_ranks=partial(start, recipe.cluster, recipe.model, os.environ),
            start_server=actors.server_starter(servers_at, placement, lent),
            engines_share_memory=is_local,
            host=places.LOOPBACK if is_local else places.own_address(),
        )


def start_ranks(
    cluster: ClusterSection, model: ModelSection, environment: Mapping[str, str], gpus: Sequence[int] = ()
) -> Ranks:
    """Rank 0's handles of the other ranks: under torchrun those that it started, else children of this process.

    gpus: index of each rank's GPU among the visible ones; empty: the rank's number. The caller closes the ranks.
    """
    from rocstar.learning.models import device_of
    from rocstar.learning.ranks import ALONE, join, lead

    device, offload = device_of(model).type, cluster.offload_optimizer
    if "TORCHELASTIC_RUN_ID" in environment or "RANK" in environment:
        return join(environment, device, offload=offload)
    if cluster.learners == 1 and not offload:
        return ALONE
    return lead(cluster.learners, device, RankProcess.begin, offload=offload, gpus=gpus)


class RankProcess(subprocess.Popen[bytes]):
    """A rank above 0 as a child of this process (`rocstar.learning.ranks.StartedRank`)."""

    @classmethod
    def begin(cls, variables: Mapping[str, str]) -> RankProcess:
        """variables: torchrun's."""
        command, environment = child_command(__name__), child_environment(variables)
        return cls(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ended(self, seconds: float) -> str | None:
        try:
            return how_ended(self.wait(timeout=seconds))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        self.kill()
        self.wait()


@contextmanager
def started_sandbox(settings: SandboxSection, *, calls: bool = True) -> Iterator[SandboxClient]:
    """A sandbox for the duration of the context: a child of this process, or those at `urls`; none where nothing calls
    it. Raises SandboxDown if one cannot be started or reached, or is below `min_isolation`."""
    level = settings.min_isolation
    if not calls:
        client = SandboxClient(daemons=0)
    elif settings.urls:
        need("sandbox")
        token = os.environ.get("ROCSTAR_SANDBOX_TOKEN", "")
        client = SandboxClient.connect(settings.urls, token=token, min_isolation=level)
    else:
        client = SandboxClient.start(slots=settings.slots, preload=settings.preload, min_isolation=level)
    with client:
        yield client


def refuse_weak_sandbox(cluster: ClusterSection, sandbox: SandboxSection) -> None:
    """Start the sandbox of a run, or reach its services, and end that again: a machine that offers less isolation than
    `sandbox.min_isolation` is refused before there is a run. Services that Ray places cannot be tried. Raises
    SandboxDown."""
    if not cluster.sandbox_nodes:
        with started_sandbox(sandbox.model_copy(update={"slots": 1, "preload": []})):
            pass


def main(arguments: Sequence[str] = ()) -> int:
    """The program of a learner rank that is a child of rank 0 (`support/child.py`)."""
    from rocstar.learning.ranks import serve_rank

    try:
        serve_rank(os.environ)
    except RunHalted:  # rank 0 reports it
        return 1
    except RocstarError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 1
    return 0
