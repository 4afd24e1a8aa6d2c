"""Learner ranks above 0 as Ray actors; rank 0 is the driver, the process that trains.

Ray chooses the machines and tells how a rank ended. What ranks exchange does not pass through it (`learning/ranks.py`).
Not done: an actor is not restarted. A run whose rank died ends, and is resumed by a person.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rocstar.config import ClusterSection, ModelSection
from rocstar.errors import ConfigError, Unavailable
from rocstar.launch import quiet_torch

if TYPE_CHECKING:
    from rocstar.learning.ranks import Ranks

PLACE_SECONDS = 60.0  # others may be giving their places back; what Ray lacks altogether is refused at once
START_SECONDS = 300.0  # for new processes to import torch, all at once and from a slow disk
END_SECONDS = 10.0
TELL_SECONDS = 1.0
PINNED = 0.001  # of `node:ADDRESS`, of which each machine has 1: so little places a bundle there and shuts nobody out
LOOPBACK = "127.0.0.1"


class LearnerActor:
    """Lives as a process of torchrun does."""

    def __init__(self, folder: str) -> None:
        """folder: where rank 0 works, on a file system that all machines share: checkpoint paths may be relative to it.
        Raises OSError where it is not there."""
        os.chdir(folder)
        quiet_torch(1)  # before torch is loaded; rank 0 says later how many threads there are
        from rocstar.learning.ranks import serve_rank

        self.serve_rank = serve_rank

    def address(self) -> str:
        """Of its machine."""
        return _address()

    def serve(self, variables: Mapping[str, str]) -> None:
        """Until rank 0 ends. Raises RunHalted when it is gone."""
        try:
            self.serve_rank(variables)
        finally:
            # The others notice by our closed connections; what we raise goes to rank 0 before.
            threading.Timer(TELL_SECONDS, os._exit, (1,)).start()


class RayRank:
    """A rank above 0, as `rocstar.learning.ranks.Child`."""

    def __init__(self, actor: Any, group: PlacementGroup, variables: Mapping[str, str]) -> None:
        self.actor, self.group = actor, group
        self.life = actor.serve.remote(variables)

    def ended(self, seconds: float) -> str | None:
        try:
            ray.get(self.life, timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return f"ended: {_sentence(error)}"
        return "ended"

    def end(self) -> None:
        """All ranks go with their placement group."""
        with suppress(ray.exceptions.RayError):
            remove_placement_group(self.group)
        self.ended(END_SECONDS)


def start(cluster: ClusterSection, model: ModelSection, environment: Mapping[str, str]) -> Ranks:
    """As `rocstar.learning.ranks.start`: on the Ray cluster that RAY_ADDRESS names or this machine belongs to, else on
    a Ray of our own, which ends with this process.

    Raises ConfigError under torchrun and where Ray lacks room, Unavailable where Ray fails."""
    from rocstar.learning.ranks import ALONE

    if "TORCHELASTIC_RUN_ID" in environment:
        raise ConfigError('torchrun has started the learners already; leave it out or set cluster.launcher "processes"')
    if cluster.learners == 1 and not cluster.offload_optimizer:
        return ALONE
    try:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        return _placed(cluster, model, environment)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise Unavailable(f"Ray did not start the learner ranks: {_sentence(error)}") from error


def _placed(cluster: ClusterSection, model: ModelSection, environment: Mapping[str, str]) -> Ranks:
    from rocstar.learning.models import device_of
    from rocstar.learning.ranks import lead

    gpus, own_address = int(device_of(model).type == "cuda"), _address()
    group = _places(cluster.learners, gpus, own_address)
    try:
        actor: Any = ray.remote(LearnerActor)
        actors = [
            actor.options(num_cpus=1, **_at(group, rank, gpus)).remote(os.getcwd())
            for rank in range(1, cluster.learners)
        ]
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=START_SECONDS)

        def begin(variables: Mapping[str, str]) -> RayRank:
            alone = {**variables, "LOCAL_RANK": "0"}  # Ray shows an actor no GPU but its own
            return RayRank(actors[int(variables["RANK"]) - 1], group, alone)

        host = LOOPBACK if set(addresses) <= {own_address} else own_address
        return lead(cluster, model, begin, host=host, local_rank=_own_gpu(group, environment) if gpus else 0)
    except BaseException:
        remove_placement_group(group)
        raise


def _places(ranks: int, gpus: int, own_address: str) -> PlacementGroup:
    """A place for each rank, that of rank 0 on this machine. Raises ConfigError."""
    gpu = {"GPU": gpus} if gpus else {}
    group = placement_group(
        [{f"node:{own_address}": PINNED, **gpu}, *[{"CPU": 1, **gpu}] * (ranks - 1)], strategy="PACK"
    )
    needed, there = {"CPU": ranks - 1, "GPU": gpus * ranks}, ray.cluster_resources()
    if all(there.get(name, 0) >= count for name, count in needed.items()) and group.wait(PLACE_SECONDS):
        return group
    free = ray.available_resources()
    remove_placement_group(group)
    said = {
        name: f"{count} {name}s, of which Ray has {there.get(name, 0):g} and {free.get(name, 0):g} free"
        for name, count in needed.items()
        if count
    }
    raise ConfigError(
        f"cluster.learners {ranks} need {' and '.join(said.values())}; lower cluster.learners or add machines"
    )


def _at(group: PlacementGroup, rank: int, gpus: int) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return {"num_gpus": gpus, "scheduling_strategy": strategy}


def _own_gpu(group: PlacementGroup, environment: Mapping[str, str]) -> int:
    """Index, among the GPUs that this process sees, of the one set aside for rank 0. Raises ConfigError."""
    asked: Any = ray.remote(lambda: ray.get_gpu_ids())
    (found,) = ray.get(asked.options(num_cpus=0, **_at(group, 0, 1)).remote(), timeout=START_SECONDS)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(found)
    if str(found) not in visible.split(","):
        raise ConfigError(f"Ray lends GPU {found} to rank 0, but CUDA_VISIBLE_DEVICES is {visible}; unset it")
    return visible.split(",").index(str(found))


def _address() -> str:
    """Of this machine in the Ray cluster."""
    own_address: Any = ray.util.get_node_ip_address
    return str(own_address())


def _sentence(error: Exception) -> str:
    """Ray writes paragraphs and tracebacks; what happened stands in the cause, or in the first line."""
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split("\n")[0].split()).rstrip(".") or type(cause).__name__
