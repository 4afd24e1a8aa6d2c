"""Learner ranks above 0 as Ray actors; rank 0 is the driver, the process that trains.

Ray chooses the machines and says how a rank ended. What ranks exchange does not pass through Ray (`learning/ranks.py`).
Not done: an actor is not restarted. A run whose rank died ends, and is resumed by a person.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster.here import start_ranks
from rocstar.cluster.places import (
    LOOPBACK,
    START_SECONDS,
    Wish,
    at,
    end_with_ray,
    give_back,
    gpus,
    own_address,
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
TELL_SECONDS = 1.0
PINNED = 0.001  # of `node:ADDRESS`, of which each machine has 1: places a bundle there and leaves room for others


class LearnerActor:
    """A learner rank, which lives as long as one that torchrun starts."""

    def __init__(self, folder: str) -> None:
        """folder: where rank 0 works, on a file system that all machines share: checkpoint paths may be relative to it.
        Raises OSError where it is not there."""
        end_with_ray()  # also where rank 0 is out of reach, whose connections then stay open
        os.chdir(folder)
        quiet_torch()  # before torch is loaded; rank 0 says later how many threads there are
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
            # The others notice by our closed connections; what we raise goes to rank 0 before.
            threading.Timer(TELL_SECONDS, os._exit, (1,)).start()


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
        give_back(self.group)
        self.ended(END_SECONDS)


def wish(learners: Sequence[Placed], driver: str) -> Wish:
    """A place for each rank, with its GPU; that of rank 0 on the machine of this address, the driver's."""
    own = [{f"node:{driver}": PINNED}, *[{"CPU": 1.0}] * (len(learners) - 1)]
    places = [{**place, **gpus(learner.needs)} for place, learner in zip(own, learners, strict=True)]
    return Wish(learners[0].asked_by, places)


def start(
    cluster: ClusterSection,
    model: ModelSection,
    environment: Mapping[str, str],
    group: PlacementGroup | None,
    learners: Sequence[Placed],
) -> Ranks:
    """As `start_ranks`, in the places of `wish`; without any, rank 0 is alone and needs none. Raises ConfigError where
    this process does not see the GPU that Ray lends it, Unavailable where Ray fails."""
    if group is None:
        return start_ranks(cluster, model, environment)
    try:
        return _placed(cluster, model, environment, group, learners)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Unavailable(f"Ray did not start the learner ranks: {sentence(error)}") from error


def _placed(
    cluster: ClusterSection,
    model: ModelSection,
    environment: Mapping[str, str],
    group: PlacementGroup,
    learners: Sequence[Placed],
) -> Ranks:
    from rocstar.learning.ranks import Ranks, lead

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
    seen = [own_gpu, *[0] * len(actors)]  # Ray shows an actor no GPU but its own
    return lead(cluster, model, begin, host=host, gpus=seen)


def _own_gpu(group: PlacementGroup, environment: Mapping[str, str]) -> int:
    """Index, among the GPUs that this process sees, of the one set aside for rank 0. Raises ConfigError."""
    asked: Any = ray.remote(lambda: ray.get_gpu_ids())
    (found,) = ray.get(asked.options(**at(group, 0, gpus=1)).remote(), timeout=START_SECONDS)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(found)
    if str(found) not in visible.split(","):
        raise ConfigError(f"Ray lends GPU {found} to rank 0, but CUDA_VISIBLE_DEVICES is {visible}; unset it")
    return visible.split(",").index(str(found))
