"""A node: one sandbox, joined to one router or to several (a service of many processes has one each)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rocstar.sandbox.router.uplink import BEAT_SECONDS, Uplink
from rocstar.sandbox.router.work import Work
from rocstar.sandbox.wire import SandboxDown

AHEAD = 4  # calls a node takes per slot: enough that no slot waits for the next batch, few enough to be fair
DRAIN_SECONDS = 120.0


class NodeAgent:
    """Does what its routers send. `serve` ends after `leave`, or raises."""

    def __init__(
        self, work: Work, *, routers: Sequence[str], token: str, label: str = "", capacity: int | None = None
    ) -> None:
        """label: what people call the node; the host's name and our process id by default. capacity: calls taken at
        once from each router; four per slot by default."""
        self.work = work
        self.slots = work.info().slots
        self.capacity = capacity or AHEAD * self.slots
        self.label = label or f"{socket.gethostname()}-{os.getpid()}"
        self.name = f"{self.label}-{os.urandom(6).hex()}"
        self.uplinks = [Uplink(address, token, work, self.describe) for address in routers]
        self.leaving = asyncio.Event()

    def describe(self, uplink: Uplink) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "slots": self.slots,
            "capacity": 0 if self.leaving.is_set() else self.capacity,
            "others": sum(len(other.running) for other in self.uplinks if other is not uplink),
            "cpu_seconds": round(time.process_time() + self.work.cpu_seconds(), 3),
        }

    def leave(self) -> None:
        """Take no more calls; `serve` returns when the last result has arrived."""
        self.leaving.set()

    async def serve(self) -> None:
        """Raises Refused when a router has another token, SandboxDown when the sandbox no longer answers."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(uplink.keep()) for uplink in self.uplinks]
            await self.watch()
            for task in tasks:
                task.cancel()

    async def watch(self) -> None:
        drained_by = None
        while True:
            await asyncio.sleep(BEAT_SECONDS / 2)
            now = time.monotonic()
            if any(uplink.is_stuck(now) for uplink in self.uplinks):
                raise SandboxDown(f"the sandbox of node {self.label} no longer answers")
            if self.leaving.is_set():
                drained_by = drained_by or now + DRAIN_SECONDS
                if now > drained_by or not any(uplink.running or uplink.records for uplink in self.uplinks):
                    return
