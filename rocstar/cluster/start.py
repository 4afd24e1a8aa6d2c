"""The machines of a run: what is started beside its own process, here or where Ray places it (`[cluster]`)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rocstar.cluster.here import Machines, opened_here

if TYPE_CHECKING:
    from rocstar.config.sections import Recipe
    from rocstar.parts.placement import Placement


def opened_machines(recipe: Recipe, proof: Path, placement: Placement) -> AbstractContextManager[Machines]:
    """Machines for a recipe, for as long as the context. proof: a file in the folder that engines and learners read
    from; every machine must see it with the same content. placement: what runs on which GPU. Raises ConfigError
    where Ray lacks room or a machine lacks the file, Unavailable where Ray fails, SandboxDown."""
    wanted = placement.learners or placement.servers or recipe.cluster.sandbox_nodes
    if recipe.cluster.launcher == "processes" or not wanted:
        return opened_here(recipe, placement)
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        # A Ray of this run's own listens on loopback only. Its one switch for that is meant for other systems, and is
        # read as Ray is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from rocstar.cluster.by_ray import opened  # Ray, which is an extra

    return opened(recipe, proof, placement)
