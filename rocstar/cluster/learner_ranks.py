"""Learner ranks above 0 as Ray actors; rank 0 is the driver, the process that trains.

Ray chooses the machines and reports how a rank ended. Ranks exchange data without Ray (`learning/ranks.py`).
Not done: an actor is not restarted. A run whose rank died ends, and a person resumes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster.places import (
    LOOPBACK,
    START_SECONDS,
    PlaceRequest,
    at,
    end_with_ray,
    gpus,
    own_address,
    release,
    sentence,
)
from rocstar.config.places import ClusterSection
from rocstar.config.sections import ModelSection
from rocstar.errors import ConfigError, Unavailable
from rocstar.support.threads import quiet_torch

if TYPE_CHECKING:
    from rocstar.learning.ranks import Ranks
    from rocstar.parts.placement import Placed

END_SECONDS = 10.0
REPORT_SECONDS = 1.0  # for Ray to deliver an error to rank 0
PINNED = 0.001  # of the resource `node:ADDRESS`, of which each machine has 1: places a bundle on that machine


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
        release(self.group)
        self.ended(END_SECONDS)


def place_request(learners: Sequence[Placed], driver: str) -> PlaceRequest:
    """A place for each rank, with its GPU; rank 0's is on the machine with the address `driver`."""
    bases = [{f"node:{driver}": PINNED}, *[{"CPU": 1.0}] * (len(learners) - 1)]
    places = [{**base, **gpus(learner.needs)} for base, learner in zip(bases, learners, strict=True)]
    return PlaceRequest(learners[0].asked_by, places)


def start(
    cluster: ClusterSection,
    model: ModelSection,
    environment: Mapping[str, str],
    group: PlacementGroup,
    learners: Sequence[Placed],
) -> Ranks:
    """As `here.start_ranks`, in the places of `place_request`. Raises ConfigError if the GPU that Ray assigns to this
    process is not visible here, Unavailable if Ray fails."""
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
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=START_SECONDS)

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
    (found,) = ray.get(gpu_ids.options(**at(group, 0, gpus=1)).remote(), timeout=START_SECONDS)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(found)
    if str(found) not in visible.split(","):
        raise ConfigError(f"Ray lends GPU {found} to rank 0, but CUDA_VISIBLE_DEVICES is {visible}; unset it")
    return visible.split(",").index(str(found))
