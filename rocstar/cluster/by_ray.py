"""The processes that a recipe places by Ray, as `Machines`: further learner ranks, vLLM servers, sandbox services.

Places for all of them are reserved in one Ray cluster before any starts; all of them end with the context."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocstar.cluster import learner_ranks, sandbox_nodes, vllm_servers
from rocstar.cluster.here import Machines, start_ranks, started_sandbox
from rocstar.cluster.places import (
    LOOPBACK,
    PlaceRequest,
    are_here,
    assigned_gpus,
    connected,
    gpus_of_machines,
    needed,
    own_address,
    refuse_unshared,
    reserved,
)
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError

if TYPE_CHECKING:
    from rocstar.parts.placement import Placement

LEARNERS, SERVERS, SANDBOXES = "learners", "servers", "sandboxes"


@contextmanager
def opened(recipe: Recipe, proof: Path, placement: Placement) -> Iterator[Machines]:
    """See `rocstar.cluster.start.opened_machines`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError('torchrun has started the learners already; leave it out or set cluster.launcher "processes"')
    with ExitStack() as stack:
        nodes = recipe.cluster.sandbox_nodes
        child = None if nodes else stack.enter_context(started_sandbox(recipe.sandbox))
        requests = partial(place_requests, recipe, placement)
        stack.enter_context(connected(needed(requests().values()).get("CPU", 0)))
        if placement.gpu_bytes:
            placement.on(gpus_of_machines())
        groups = stack.enter_context(reserved(requests(own_address())))
        for name in {LEARNERS, SERVERS} & groups.keys():
            refuse_unshared(groups[name], proof)
        shared = shares_gpus(placement)
        at = groups.get(LEARNERS)
        start = partial(learner_ranks.start, group=at, learners=placement.learners) if at else start_ranks
        servers_at = groups.get(LEARNERS if shared else SERVERS)
        is_local = not (placement.servers and servers_at) or are_here(servers_at)
        yield Machines(
            sandbox=child or stack.enter_context(sandbox_nodes.opened(recipe.sandbox, nodes, groups[SANDBOXES])),
            start_ranks=partial(start, recipe.cluster, recipe.model, os.environ),
            start_server=vllm_servers.starter(servers_at, placement, assigned_gpus(groups[LEARNERS]) if shared else ()),
            engines_share_memory=is_local,
            host=LOOPBACK if is_local else own_address(),
        )


def place_requests(recipe: Recipe, placement: Placement, driver: str = LOOPBACK) -> Mapping[str, PlaceRequest]:
    """The places to reserve. driver: address of this machine."""
    cluster, learners, servers = recipe.cluster, placement.learners, placement.servers
    found: dict[str, PlaceRequest] = {}
    if len(learners) > 1 or any(learner.needs for learner in learners):
        found[LEARNERS] = learner_ranks.place_request(learners, driver)
    if servers and not shares_gpus(placement):
        found[SERVERS] = vllm_servers.place_request(servers)
    if cluster.sandbox_nodes:
        found[SANDBOXES] = sandbox_nodes.place_request(cluster.sandbox_nodes, recipe.sandbox.slots)
    return found


def shares_gpus(placement: Placement) -> bool:
    """Whether servers run on the GPUs that Ray has assigned to learners."""
    return placement.colocate and any(server.needs for server in placement.servers)
