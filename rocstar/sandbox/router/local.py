"""Nodes on this machine: starts them as processes, starts another for one that dies, ends them with us.

On one machine a single SandboxClient with more slots does the same; several nodes survive the death of one, and use
more than the few thousand calls a second that one host process can take.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence

from rocstar.sandbox.router.face import RouterFace
from rocstar.sandbox.router.node_process import NodeProcess
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.wire import Isolation, SandboxDown

LOOK_SECONDS = 0.05  # between two looks whether a node has died
RESTART_SECONDS = 1.0  # a node that dies sooner than this after its start waits so long for the next


class LocalCluster(RouterFace):
    """A router and its nodes. The same face as `SandboxClient`. Make it with `start`, before torch is imported.

    A thread consumes the ends of node processes and produces new ones; `close` unblocks it."""

    def __init__(self, router: Router, folder: str, settings: Sequence[str], token: str) -> None:
        super().__init__(router, ())
        self.folder = folder
        self.settings = settings
        self.token = token
        self.children: list[NodeProcess] = []
        self.closing = threading.Event()
        self.keeper = threading.Thread(target=self.keep, name="sandbox-nodes", daemon=True)

    @classmethod
    def start(
        cls,
        *,
        nodes: int = 2,
        slots: int = 2,
        preload: Sequence[str] = ("numpy", "sympy"),
        min_isolation: str = Isolation.L1,
        policy: Policy | None = None,
        queue_seconds: float = 600.0,
        more: Sequence[str] = (),
    ) -> LocalCluster:
        """Start nodes with `slots` each and wait until they serve. more: further options of `node_main`. Raises
        SandboxDown when one cannot start."""
        folder = tempfile.mkdtemp(prefix="rocstar-")  # only we may look into it
        token = secrets.token_hex(16)
        router = Router(address=f"unix:{folder}/router", token=token, policy=policy, queue_seconds=queue_seconds)
        settings = [f"--slots={slots}", f"--preload={','.join(preload)}", f"--min-isolation={min_isolation}", *more]
        cluster = cls(router, folder, settings, token)
        try:
            cluster.children = [cluster.spawn(f"node{number}") for number in range(nodes)]
            cluster.infos = [child.await_ready() for child in cluster.children]
        except (OSError, SandboxDown) as error:
            cluster.close()
            raise SandboxDown(str(error)) from error
        cluster.keeper.start()
        return cluster

    def close(self) -> None:
        """End the nodes and the router. May be called twice."""
        self.closing.set()
        if self.keeper.is_alive():
            self.keeper.join()
        self.router.close()
        for child in self.children:
            child.process.send_signal(signal.SIGINT)
        for child in self.children:
            child.see_out()
        self.children = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self) -> None:
        """Start another node for each that ended, until `close`."""
        while not self.closing.wait(LOOK_SECONDS):
            for place, child in enumerate(self.children):
                if child.process.poll() is not None and time.monotonic() > child.started + RESTART_SECONDS:
                    child.see_out()
                    self.children[place] = self.spawn(child.label)

    def spawn(self, label: str) -> NodeProcess:
        """Raises OSError."""
        return NodeProcess(
            address=self.router.address, token=self.token, label=label, settings=self.settings, folder=self.folder
        )
