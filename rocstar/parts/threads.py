"""The number of torch's threads: what `run.threads = "auto"` means for a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from rocstar.config.places import ClusterSection
from rocstar.config.sections import ModelSection, Recipe
from rocstar.learning.models import device_of, use_threads
from rocstar.parts.shape import known_shape
from rocstar.sandbox.container import cpu_shares

SMALL = 2**17  # numbers of a layer's matrix; a product with fewer takes microseconds, which waking threads takes too


def begin_threads(recipe: Recipe, model: Path | None, before: int | None = None) -> None:
    """Set torch's threads to `run.threads`. model: the folder of the weights, None for the recipe's own shape. before:
    the number that the run has computed with, which `auto` keeps."""
    given = recipe.run.threads
    use_threads((before or _share(recipe.model, model, recipe.cluster)) if given == "auto" else given)


def _share(settings: ModelSection, model: Path | None, cluster: ClusterSection) -> int:
    """The physical cores of each learner here; 1 for a small model, one of unknown shape and one on a GPU."""
    shape = known_shape(settings, model)
    if shape is None or shape.hidden * shape.intermediate < SMALL or device_of(settings).type != "cpu":
        return 1
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
    learners = int(started) if started else cluster.learners if cluster.launcher == "processes" else 1
    return max(1, cores() // learners)


def cores() -> int:
    """Physical cores that this process may keep busy: of those that it may run on, as many as its control group's share
    comes to."""
    allowed = os.sched_getaffinity(0)
    known = Path("/sys/devices/system/cpu")
    physical = {_read(known / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    return max(1, min([len(physical), *map(int, cpu_shares())]))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
