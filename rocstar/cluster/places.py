"""Ray itself, one for all that a run places, and room in it: set aside before anything starts, or refused.

Not here: what is placed (learner_ranks.py, vllm_servers.py, sandbox_nodes.py), and who needs how much (by_ray.py).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rocstar.errors import ConfigError, Unavailable

LOOPBACK = "127.0.0.1"
PLACE_SECONDS = 60.0  # others may be giving their places back; what Ray lacks altogether is refused at once
START_SECONDS = 300.0  # for new processes to import rocstar, all at once and from a slow disk
LOOK_SECONDS = 1.0  # between two looks whether the Ray of this machine is there
OBJECT_STORE_BYTES = 80 * 2**20  # hardly more than Ray's least, 75 MiB: nothing of ours passes through it
REACHING = "start Ray on this machine as a node of that cluster, and set RAY_AUTH_MODE=token if it asks for a token"
ANY_PLACE = -1  # of a group, as Ray calls it


class Wish(NamedTuple):
    """Places that are wanted together."""

    asked_by: str
    """What of the recipe asks for them, with its value."""
    places: Sequence[Mapping[str, float]]
    """What each takes of its machine, by the names that Ray has for it."""
    strategy: str = "PACK"
    """PACK: on as few machines as can be; SPREAD: on as many."""


@contextmanager
def connected(cpus: float) -> Iterator[None]:
    """This process as a driver of the Ray that it is connected to already, else of the cluster that RAY_ADDRESS names,
    else of one on this machine, which ends with the context. The last counts at least `cpus` CPUs: what runs on one
    machine shares its cores, as processes do. Raises Unavailable."""
    begins = not ray.is_initialized()
    try:
        if begins:
            _begin(cpus)
        yield
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray failed: {sentence(error)}") from error
    finally:
        if begins:
            ray.shutdown()


def _begin(cpus: float) -> None:
    named = os.environ.get("RAY_ADDRESS", "local") != "local"
    own = {
        "address": "local",
        "num_cpus": max(math.ceil(cpus), os.cpu_count() or 1),
        "object_store_memory": OBJECT_STORE_BYTES,
        "_system_config": {"worker_niceness": 0},  # Ray's 15 makes rank 0 and its gradients wait for the other ranks
    }
    try:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **({} if named else own))
    except (ConnectionError, RuntimeError, ValueError) as error:
        advice = f"; {REACHING}" if named else ""
        raise Unavailable(f"Ray could not be started or reached: {sentence(error)}{advice}") from error


@contextmanager
def set_aside(wishes: Mapping[str, Wish]) -> Iterator[dict[str, PlacementGroup]]:
    """A placement group for each wish; what runs in them ends with the context. Raises ConfigError."""
    there = ray.cluster_resources()
    if any(there.get(name, 0) < amount for name, amount in needed(wishes.values()).items()):
        raise _no_room(wishes.values())  # what Ray will never have is not waited for
    groups = {
        name: placement_group([dict(place) for place in wish.places], strategy=wish.strategy)
        for name, wish in wishes.items()
    }
    try:
        deadline = time.monotonic() + PLACE_SECONDS
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups.values()):
            raise _no_room(wishes.values())
        yield groups
    finally:
        for group in groups.values():
            give_back(group)


def _no_room(wishes: Collection[Wish]) -> ConfigError:
    asking = " and ".join(wish.asked_by for wish in wishes)
    there, free = ray.cluster_resources(), ray.available_resources()
    said = [
        f"{amount:g} {name}s, of which Ray has {there.get(name, 0):g} and {free.get(name, 0):g} free"
        for name, amount in needed(wishes).items()
    ]
    return ConfigError(f"{asking} need {' and '.join(said)}; ask for less or add machines")


def gpus(count: int) -> dict[str, float]:
    """So many GPUs of a place, in Ray's words."""
    return {"GPU": count} if count else {}


def gpus_of_machines() -> dict[str, tuple[str, ...]]:
    """The GPUs of each machine by Ray's counting; this machine's come first."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != _here())
    return {
        f"machine {number} ({node['NodeManagerAddress']})": tuple(map(str, range(int(node["Resources"].get("GPU", 0)))))
        for number, node in enumerate(alive)
    }


def gpus_lent(group: PlacementGroup) -> list[tuple[str, str]]:
    """Machine and GPU of each place of a group, in all of which nothing runs yet and each of which has one GPU."""
    ask: Any = ray.remote(lambda: str(ray.get_gpu_ids()[0]))
    machines = _machines(group)
    found = [ask.options(**at(group, place, gpus=1)).remote() for place in range(len(machines))]
    return list(zip(machines, ray.get(found, timeout=START_SECONDS), strict=True))


def needed(wishes: Collection[Wish]) -> dict[str, float]:
    """CPUs and GPUs of all places together."""
    places = [place for wish in wishes for place in wish.places]
    total = {name: sum(place.get(name, 0) for place in places) for name in ("CPU", "GPU")}
    return {name: amount for name, amount in total.items() if amount}


def give_back(group: PlacementGroup) -> None:
    """Give a group's places back and kill what runs in them; does nothing where they are gone."""
    with suppress(ray.exceptions.RayError):
        remove_placement_group(group)


def at(group: PlacementGroup, place: int = ANY_PLACE, *, gpus: int = 0, cpus: float = 0) -> dict[str, Any]:
    """Options of a task or an actor in a group's place."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def end_with_ray() -> None:
    """Let this actor's process end with the Ray that started it. A worker of Ray's notices that only when it next calls
    Ray; until then a server would keep its GPU."""
    ray_process = os.getppid()

    def watch() -> None:
        while os.getppid() == ray_process:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def are_here(group: PlacementGroup) -> bool:
    """Whether all places of a group are on this machine."""
    return set(_machines(group)) <= {_here()}


def refuse_unshared(group: PlacementGroup, proof: Path) -> None:
    """Raises ConfigError where a machine of the group has no such file, or another one, in that place."""
    expected = proof.read_bytes()
    ask: Any = ray.remote(_content)
    elsewhere = {machine: place for place, machine in enumerate(_machines(group)) if machine != _here()}
    found = [ask.options(**at(group, place)).remote(str(proof)) for place in elsewhere.values()]
    for address, content in ray.get(found, timeout=START_SECONDS):
        if content != expected:
            raise ConfigError(
                f"Ray places a part of this run on {address}, which does not see {proof}; put that folder on a file "
                "system that all machines share, under one path"
            )


def _here() -> str:
    """Ray's id of this machine."""
    return str(ray.get_runtime_context().get_node_id())


def _machines(group: PlacementGroup) -> list[str]:
    """Ray's id of the machine of each place."""
    found: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [found[place] for place in sorted(found)]


def _content(file: str) -> tuple[str, bytes | None]:
    """This machine's address and the bytes of a file on it; None where it can't be read."""
    try:
        return own_address(), Path(file).read_bytes()
    except OSError:
        return own_address(), None


def own_address() -> str:
    """The address of this machine in the Ray cluster."""
    address: Any = ray.util.get_node_ip_address
    return str(address())


def sentence(error: Exception) -> str:
    """Ray writes paragraphs and tracebacks; what happened stands in the cause, or in the first line, and in the last
    where an actor could not be made."""
    lines = str(getattr(error, "cause", None) or error).strip().split("\n")
    told = lines[-1] if "creation task" in lines[0] else lines[0]
    return " ".join(told.split()).rstrip(".") or type(error).__name__
