"""What a run starts on its own machine: a sandbox, learner ranks, vLLM servers. What Ray places is in by_ray.py.

The sandbox is started before anything loads torch, while this process is still small."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocstar.sandbox.client import SandboxClient
from rocstar.support.exits import need

if TYPE_CHECKING:
    from rocstar.config.places import SandboxSection
    from rocstar.config.sections import Recipe
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
    """Whether all engines can read what lies in this machine's memory (/dev/shm)."""


@contextmanager
def opened_here(recipe: Recipe, placement: Placement) -> Iterator[Machines]:
    """See `rocstar.cluster.start.opened_machines`."""
    from rocstar.engines.vllm_server import VllmServer

    def start_ranks() -> Ranks:
        from rocstar.learning.ranks import start

        return start(recipe.cluster, recipe.model, os.environ, placement.local_ranks)

    with started_sandbox(recipe.sandbox) as sandbox:
        yield Machines(
            sandbox=sandbox,
            start_ranks=start_ranks,
            start_server=VllmServer.start,
            engines_share_memory=True,
        )


@contextmanager
def started_sandbox(settings: SandboxSection) -> Iterator[SandboxClient]:
    """A sandbox for as long as the context: a child of this process, or those at `urls`. Raises SandboxDown where one
    cannot be started or reached, and below `min_isolation`."""
    level = settings.min_isolation
    if settings.urls:
        need("sandbox")
        token = os.environ.get("ROCSTAR_SANDBOX_TOKEN", "")
        client = SandboxClient.connect(settings.urls, token=token, min_isolation=level)
    else:
        client = SandboxClient.start(slots=settings.slots, preload=settings.preload, min_isolation=level)
    with client:
        yield client
