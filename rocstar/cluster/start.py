"""The machines of a run: processes that it starts besides its own, here or where Ray places them (`[cluster]`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocstar.cluster.here import Machines, start_ranks, started_sandbox

if TYPE_CHECKING:
    from rocstar.config.places import ClusterSection, SandboxSection
    from rocstar.config.sections import Recipe
    from rocstar.parts.placement import Placement


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
    from rocstar.cluster.by_ray import opened  # Ray, which is an extra

    with opened(recipe, proof, placement) as machines:
        yield machines


def refuse_weak_sandbox(cluster: ClusterSection, sandbox: SandboxSection) -> None:
    """Start the sandbox of a run, or reach its services, and end that again: a machine that offers less isolation than
    `sandbox.min_isolation` is refused before there is a run. Services that Ray places cannot be tried. Raises
    SandboxDown."""
    if not cluster.sandbox_nodes:
        with started_sandbox(sandbox.model_copy(update={"slots": 1, "preload": []})):
            pass
