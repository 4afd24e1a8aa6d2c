"""What a recipe places by Ray, as `Machines`: further learner ranks, vLLM servers, sandbox services.

Room for all of it is set aside in one Ray before any of it starts; all of it ends with the context."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ray.util.placement_group import PlacementGroup

from rocstar.cluster import learner_ranks, sandbox_nodes, vllm_servers
from rocstar.cluster.here import Machines, started_sandbox
from rocstar.cluster.places import (
    LOOPBACK,
    Wish,
    are_here,
    connected,
    gpus_lent,
    gpus_of_machines,
    needed,
    own_address,
    refuse_unshared,
    set_aside,
)
from rocstar.config.places import SandboxSection
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.sandbox.client import SandboxClient

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
        wanted = partial(wishes, recipe, placement)
        stack.enter_context(connected(needed(wanted().values()).get("CPU", 0)))
        if placement.gpu_bytes:
            placement.on(gpus_of_machines())
        groups = stack.enter_context(set_aside(wanted(own_address())))
        for name in {LEARNERS, SERVERS} & groups.keys():
            refuse_unshared(groups[name], proof)
        shared = shares_gpus(placement)
        servers_at = groups.get(LEARNERS if shared else SERVERS)
        near = not (placement.servers and servers_at) or are_here(servers_at)
        yield Machines(
            sandbox=child or stack.enter_context(_placed_sandbox(recipe.sandbox, nodes, groups[SANDBOXES])),
            start_ranks=partial(
                learner_ranks.start, recipe.cluster, recipe.model, os.environ, groups.get(LEARNERS), placement.learners
            ),
            start_server=vllm_servers.starter(servers_at, placement, gpus_lent(groups[LEARNERS]) if shared else ()),
            engines_share_memory=near,
            host=LOOPBACK if near else own_address(),
        )


def wishes(recipe: Recipe, placement: Placement, driver: str = LOOPBACK) -> Mapping[str, Wish]:
    """The places to set aside. driver: address of this machine."""
    cluster, learners, servers = recipe.cluster, placement.learners, placement.servers
    found: dict[str, Wish] = {}
    if len(learners) > 1 or any(learner.needs for learner in learners):
        found[LEARNERS] = learner_ranks.wish(learners, driver)
    if servers and not shares_gpus(placement):
        found[SERVERS] = vllm_servers.wish(servers)
    if cluster.sandbox_nodes:
        found[SANDBOXES] = sandbox_nodes.wish(cluster.sandbox_nodes, recipe.sandbox.slots)
    return found


def shares_gpus(placement: Placement) -> bool:
    """Whether servers run on the GPUs that learners were lent."""
    return placement.colocate and any(server.needs for server in placement.servers)


@contextmanager
def _placed_sandbox(settings: SandboxSection, nodes: int, group: PlacementGroup) -> Iterator[SandboxClient]:
    placed = sandbox_nodes.start(
        nodes, slots=settings.slots, preload=settings.preload, min_isolation=settings.min_isolation, group=group
    )
    least = settings.min_isolation
    with closing(placed), SandboxClient.connect(placed.addresses, token=placed.token, min_isolation=least) as client:
        yield client
