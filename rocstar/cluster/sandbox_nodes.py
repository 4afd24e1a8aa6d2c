"""Sandbox nodes on the machines of a Ray cluster: Ray places and restarts them, the router gives them work.

Calls do not pass through Ray: each actor starts a node process on its machine, which connects to the router. So a
Ray that is slow or restarts an actor costs nothing but that node.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray

from rocstar.sandbox.router import codec
from rocstar.sandbox.router.face import RouterFace
from rocstar.sandbox.router.node_process import NodeProcess
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.wire import HostInfo, Isolation, SandboxDown

SLOTS_PER_CORE = 4  # what a node asks Ray for: one core per so many slots
CLOSE_SECONDS = 10.0
PLACE_SECONDS = 300.0  # Ray may have to start machines first


class NodeActor:
    """One node process on the machine where Ray put us. Ends with us; when it ends, so do we, and Ray restarts us."""

    def __init__(self, address: str, token: str, settings: Sequence[str]) -> None:
        """Raises SandboxDown."""
        self.folder = tempfile.mkdtemp(prefix="rocstar-")
        label = f"ray-{ray.get_runtime_context().get_actor_id()}"  # the same after a restart
        self.node = NodeProcess(address=address, token=token, label=label, settings=settings, folder=self.folder)
        try:
            self.info = self.node.await_ready()
        except SandboxDown:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.closing = False
        threading.Thread(target=self.watch, name="sandbox-node", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        return codec.info_message(self.info)

    def watch(self) -> None:
        """Dies with the node, so that Ray makes another of both."""
        self.node.process.wait()
        if not self.closing:
            shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(1)

    def label(self) -> str:
        """What the router calls the node."""
        return self.node.label

    def pid(self) -> int:
        """Of the node process."""
        return self.node.process.pid

    def close(self) -> None:
        self.closing = True
        self.node.process.send_signal(signal.SIGINT)
        self.node.see_out()
        shutil.rmtree(self.folder, ignore_errors=True)


class RaySandbox(RouterFace):
    """A router in this process and nodes on the machines of the Ray cluster that this process is connected to
    (`ray.init`). The same face as `SandboxClient`. Make it with `start`."""

    def __init__(self, router: Router, actors: Sequence[Any], infos: Sequence[HostInfo]) -> None:
        super().__init__(router, infos)
        self.actors = actors

    @classmethod
    def start(
        cls,
        *,
        nodes: int,
        slots: int,
        preload: Sequence[str] = ("numpy", "sympy"),
        min_isolation: str = Isolation.L1,
        address: str = "",
        policy: Policy | None = None,
        queue_seconds: float = 600.0,
    ) -> RaySandbox:
        """Place `nodes` nodes of `slots` slots each, over as many machines as there are, and wait until they serve.
        address: where nodes find the router; default: a free port of this machine's address in the Ray cluster.
        Raises SandboxDown when a node does not start or there is no room for it."""
        token = secrets.token_hex(16)
        own_address: Any = ray.util.get_node_ip_address
        router = Router(
            address=address or f"{own_address()}:0", token=token, policy=policy, queue_seconds=queue_seconds
        )
        settings = [f"--slots={slots}", f"--preload={','.join(preload)}", f"--min-isolation={min_isolation}"]
        cores = max(1.0, slots / SLOTS_PER_CORE)
        actor: Any = ray.remote(NodeActor)
        placed = actor.options(num_cpus=cores, scheduling_strategy="SPREAD", max_restarts=-1)
        actors = [placed.remote(router.address, token, settings) for _ in range(nodes)]
        try:
            told = ray.get([actor.describe.remote() for actor in actors], timeout=PLACE_SECONDS)
        except ray.exceptions.RayError as error:
            end(actors)
            router.close()
            room = f"{nodes} nodes of {slots} slots need {nodes * cores:g} cores"
            raise SandboxDown(f"Ray did not bring up the sandbox nodes ({room}): {error}") from error
        return cls(router, actors, [codec.parse_info(each) for each in told])

    def close(self) -> None:
        """End the nodes and the router; Ray itself stays. May be called twice."""
        self.router.close()
        end(self.actors)
        self.actors = []


def end(actors: Sequence[Any]) -> None:
    """In good order where they still answer; a node also ends when its actor does."""
    with suppress(ray.exceptions.RayError):
        ray.get([actor.close.remote() for actor in actors], timeout=CLOSE_SECONDS)
    for actor in actors:
        ray.kill(actor)
