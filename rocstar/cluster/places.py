"""The one Ray cluster of a run, and places in it: reserved before anything starts, or refused.

Not here: the placed processes and their needs (actors.py).
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rocstar
from rocstar.errors import ConfigError, Unavailable

LOOPBACK = "127.0.0.1"
PLACE_SECONDS = 60.0  # for other runs to release their places; more than Ray has in total is refused at once
HOLD_SECONDS = 5.0  # for which places are kept while others are missing
GIVE_WAY_SECONDS = 2.0  # without places, for another run to get them; Ray tries once a second to place what waits
REACH_SECONDS = 10.0
START_SECONDS = 300.0  # for new processes to import rocstar, all at once and from a slow disk
LOOK_SECONDS = 1.0  # between two checks whether this machine's Ray still runs
OBJECT_STORE_BYTES = 80 * 2**20  # little more than Ray's minimum, 75 MiB: no data of a run passes through it
REACHING = "start Ray on this machine as a node of that cluster, and set RAY_AUTH_MODE=token if it asks for a token"
ANY_PLACE = -1  # Ray's index for any place of a group


class PlaceRequest(NamedTuple):
    """Places that are reserved together."""

    asked_by: str
    """The setting of the recipe that needs them, with its value."""
    places: Sequence[Mapping[str, float]]
    """The resources that each takes of its machine, by Ray's names."""
    strategy: str = "PACK"
    """PACK: on as few machines as possible; SPREAD: on as many as possible."""


@contextmanager
def connected(cpus: float) -> Iterator[None]:
    """Connect this process as a driver: to the Ray it is connected to already, else to the cluster that RAY_ADDRESS
    names, else to a new one on this machine, which ends with the context. The last counts at least `cpus` CPUs, because
    processes on one machine share its cores anyway. Raises Unavailable."""
    is_new = not ray.is_initialized()
    try:
        if is_new:
            _connect(cpus)
        yield
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray failed: {sentence(error)}") from error
    finally:
        if is_new:
            ray.shutdown()


def _connect(cpus: float) -> None:
    address = os.environ.get("RAY_ADDRESS", "local")
    named = address != "local"
    own = {
        "address": "local",
        "num_cpus": max(math.ceil(cpus), os.cpu_count() or 1),
        "object_store_memory": OBJECT_STORE_BYTES,
        "_system_config": {"worker_niceness": 0},  # Ray's 15 makes rank 0 and its gradients wait for the other ranks
    }
    try:
        if port := re.fullmatch(r"\[?([^/]+?)\]?:(\d+)", address):
            socket.create_connection((port[1], int(port[2])), REACH_SECONDS).close()  # Ray itself tries for minutes
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **({} if named else own))
    except Exception as error:  # that of a machine too busy to start Ray within 30 s is of no narrower class
        where, advice = (f" at {address}", f"; {REACHING}") if named else ("", "")
        raise Unavailable(f"Ray could not be started or reached{where}: {sentence(error)}{advice}") from error


@contextmanager
def reserved(requests: Mapping[str, PlaceRequest]) -> Iterator[dict[str, PlacementGroup]]:
    """A placement group for each request, all of them or none; processes in them end with the context. Raises
    ConfigError."""
    total = ray.cluster_resources()
    if any(total.get(name, 0) < amount for name, amount in needed(requests.values()).items()):
        raise _no_room(requests.values())  # without waiting, because the cluster is too small
    groups: dict[str, PlacementGroup] = {}
    deadline = time.monotonic() + PLACE_SECONDS
    try:
        while missing := _missing(requests, groups, deadline):
            if time.monotonic() + 1 > deadline:  # Ray waits for whole seconds
                raise _no_room(requests.values(), missing)
            for group in groups.values():
                release(group)
            time.sleep(random.uniform(1.0, 2.0) * GIVE_WAY_SECONDS)
        yield groups
    finally:
        for group in groups.values():
            release(group)


def _missing(
    requests: Mapping[str, PlaceRequest], groups: dict[str, PlacementGroup], deadline: float
) -> list[PlaceRequest]:
    """Put a new placement group for each request into `groups`; the requests for which Ray had no room before long.
    Places for the others must be given back then: of two runs that start at once, each might hold what the other one
    waits for. The time is random, so that one of them gives way first."""
    until = min(deadline, time.monotonic() + random.uniform(1.0, 2.0) * HOLD_SECONDS)
    largest = {name: max((sum(p.values()) for p in one.places), default=0.0) for name, one in requests.items()}
    for name in sorted(requests, key=lambda name: -largest[name]):  # Ray places one group after another
        request = requests[name]
        groups[name] = placement_group([dict(place) for place in request.places], strategy=request.strategy)
    for group in groups.values():
        group.wait(max(0.0, until - time.monotonic()))
    states = {name: placement_group_table(group)["state"] for name, group in groups.items()}
    return [requests[name] for name, state in states.items() if state != "CREATED"]


def _no_room(requests: Collection[PlaceRequest], missing: Collection[PlaceRequest] = ()) -> ConfigError:
    """missing: those for which there was no room, if there was some for others."""
    settings = _settings(requests)
    total, free = ray.cluster_resources(), ray.available_resources()
    amounts = [
        f"{amount:g} {name}s, of which Ray has {total.get(name, 0):g} and {free.get(name, 0):g} free"
        for name, amount in needed(requests).items()
    ]
    held = [request for request in requests if request not in missing]
    part = f"; there was room for {_settings(held)} and none for {_settings(missing)}" if missing and held else ""
    return ConfigError(f"{settings} need {' and '.join(amounts)}{part}; ask for less or add machines")


def _settings(requests: Collection[PlaceRequest]) -> str:
    return " and ".join(request.asked_by for request in requests)


def gpus(count: int) -> dict[str, float]:
    """Ray's resources for this many GPUs."""
    return {"GPU": count} if count else {}


def gpus_of_machines() -> dict[str, tuple[str, ...]]:
    """The GPUs of each machine as Ray counts them, this machine's first."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != _here())
    return {
        f"machine {number} ({node['NodeManagerAddress']})": tuple(map(str, range(int(node["Resources"].get("GPU", 0)))))
        for number, node in enumerate(alive)
    }


def assigned_gpus(group: PlacementGroup) -> list[tuple[str, str]]:
    """Machine and GPU of each place of a group; all places must be unused and have one GPU."""
    gpu_id: Any = ray.remote(lambda: str(ray.get_gpu_ids()[0]))
    machines = _machines(group)
    found = [gpu_id.options(**at(group, place, gpus=1)).remote() for place in range(len(machines))]
    return list(zip(machines, ray.get(found, timeout=START_SECONDS), strict=True))


def needed(requests: Collection[PlaceRequest]) -> dict[str, float]:
    """CPUs and GPUs of all places together."""
    places = [place for request in requests for place in request.places]
    total = {name: sum(place.get(name, 0) for place in places) for name in ("CPU", "GPU")}
    return {name: amount for name, amount in total.items() if amount}


def release(group: PlacementGroup) -> None:
    """Release a group's places and kill the processes in them; no-op if the group is gone."""
    with suppress(ray.exceptions.RayError):
        remove_placement_group(group)


def at(group: PlacementGroup, place: int = ANY_PLACE, *, gpus: int = 0, cpus: float = 0) -> dict[str, Any]:
    """Ray's options for a task or an actor in a place of a group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def end_with_ray() -> None:
    """Let this actor's process end with the Ray that started it. A Ray worker notices the end only at its next call of
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
    """Raises ConfigError if a machine of the group does not have the file `proof` with the same content, or another
    rocstar, whose learner or server would differ in silence."""
    _, expected, own = _seen(str(proof))
    seen_of: Any = ray.remote(_seen)
    elsewhere = {machine: place for place, machine in enumerate(_machines(group)) if machine != _here()}
    found = [seen_of.options(**at(group, place)).remote(str(proof)) for place in elsewhere.values()]
    for address, content, code in ray.get(found, timeout=START_SECONDS):
        if code != own:
            raise ConfigError(
                f"Ray places a part of this run on {address}, whose rocstar is another than this machine's; install "
                "the same there, and start Ray again in that environment"
            )
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


def _seen(file: str) -> tuple[str, bytes | None, str]:
    """This machine's address, the bytes of a file on it, None if it can't be read, and a hash of its rocstar."""
    content, code = None, hashlib.sha256()
    for source in sorted(Path(rocstar.__file__).parent.rglob("*.py")):
        code.update(source.read_bytes())
    with suppress(OSError):
        content = Path(file).read_bytes()
    return own_address(), content, code.hexdigest()


def own_address() -> str:
    """The address of this machine in the Ray cluster."""
    address: Any = ray.util.get_node_ip_address
    return str(address())


def sentence(error: Exception) -> str:
    """The one line of Ray's error that states the problem: of its cause or its own text the first, or the last if an
    actor could not be created."""
    lines = str(getattr(error, "cause", None) or error).strip().split("\n")
    line = lines[-1] if "creation task" in lines[0] else lines[0]
    return " ".join(line.split()).rstrip(".") or type(error).__name__
