"""Sandbox services on the machines of a Ray cluster: Ray places them, and reports their addresses.

Calls do not pass through Ray, but go to the services. A recipe requests them with `cluster.sandbox_nodes`. A service
that dies is restarted at its address; a lost machine is not replaced.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from rocstar.cluster.places import START_SECONDS, PlaceRequest, at, end_with_ray, own_address, sentence
from rocstar.sandbox.call import SandboxDown
from rocstar.sandbox.client import SandboxClient

if TYPE_CHECKING:
    from rocstar.config.places import SandboxSection

SLOTS_PER_CORE = 4  # a service reserves one core per this many slots


class NodeActor:
    """Keeps one service running on the actor's machine; the service ends with the actor."""

    def __init__(self, token: str, options: Sequence[str]) -> None:
        end_with_ray()
        self._host = own_address()
        with socket.create_server((self._host, 0)) as free:
            self._port = free.getsockname()[1]
        serve = [sys.executable, "-Pm", "rocstar", "sandbox", "serve", f"--host={self._host}", f"--port={self._port}"]
        self._command, self._environment = [*serve, *options], {**os.environ, "ROCSTAR_SANDBOX_TOKEN": token}
        threading.Thread(target=self._keep, daemon=True).start()

    def address(self) -> str:
        """The address of the service, once it listens there."""
        while True:
            with suppress(OSError), socket.create_connection((self._host, self._port)):
                return f"http://{self._host}:{self._port}"
            time.sleep(0.1)

    def _keep(self) -> None:
        while True:
            end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            subprocess.run(self._command, env=self._environment, preexec_fn=end_with_parent)
            time.sleep(1.0)  # between tries of a service that cannot start


def place_request(nodes: int, slots: int) -> PlaceRequest:
    """A place for each service, on as many machines as possible."""
    return PlaceRequest(f"cluster.sandbox_nodes {nodes}", [{"CPU": cores_of(slots)}] * nodes, "SPREAD")


def cores_of(slots: int) -> float:
    """Cores that a service reserves."""
    return max(1.0, slots / SLOTS_PER_CORE)


@contextmanager
def opened(settings: SandboxSection, nodes: int, group: PlacementGroup) -> Iterator[SandboxClient]:
    """A client of `nodes` services with these settings, in the places of `place_request`; they end with the context.
    Raises SandboxDown if one fails."""
    token, level, cores = secrets.token_hex(16), settings.min_isolation, cores_of(settings.slots)
    options = [f"--slots={settings.slots}", f"--preload={','.join(settings.preload)}", f"--min-isolation={level}"]
    actor: Any = ray.remote(NodeActor).options(**at(group, cpus=cores))
    actors = [actor.remote(token, options) for _ in range(nodes)]
    with ExitStack() as ends:
        for each in actors:
            ends.callback(ray.kill, each)
        try:
            addresses = ray.get([each.address.remote() for each in actors], timeout=START_SECONDS)
        except ray.exceptions.RayError as error:
            need = f"{nodes} nodes of {settings.slots} slots need {nodes * cores:g} cores; each logs why"
            raise SandboxDown(f"Ray did not start the sandbox nodes ({need}): {sentence(error)}") from error
        with SandboxClient.connect(addresses, token=token, min_isolation=level) as client:
            yield client
