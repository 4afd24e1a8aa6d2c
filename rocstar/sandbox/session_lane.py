"""A session's slot, seen from the host: one cell at a time, and which sessions stand at which of its states."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.sandbox import session_wire as sw
from rocstar.sandbox.crew import Crew
from rocstar.sandbox.groups import HEADROOM_BYTES, Group
from rocstar.sandbox.lane import Lane
from rocstar.sandbox.session_wire import Order
from rocstar.sandbox.wire import Response


class SessionLane(Lane):
    """`refs`: the state of each session in it, `counts`: its committed cells; `busy`: held while a cell runs; `spare`:
    it waits for a session."""

    def __init__(self, number: int, crew: Crew, on_gone: Callable[[SessionLane], None]) -> None:
        super().__init__(number, crew)
        self.on_gone = on_gone
        self.refs: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.states = {sw.ROOT}
        self.numbers = itertools.count(sw.ROOT + 1)
        self.busy = asyncio.Lock()
        self.used = time.monotonic()
        self.dead = self.spare = False
        self.outcome: asyncio.Future[Response | None] | None = None

    async def cell(self, message: Mapping[str, Any], order: Order) -> Response | None:
        """Run it; None when the slot died."""
        if self.dead:
            return None
        self.outcome = asyncio.get_running_loop().create_future()
        self.run(message, sw.pack_order(order), lambda response: None)
        try:
            return await self.outcome
        finally:
            self.used = time.monotonic()

    def reset(self) -> None:
        """No session stands in it any more; the next may."""
        self.transport.write(sw.RESET)
        self.states = {sw.ROOT}
        self.counts.clear()
        self.spare = True

    def limit(self, group: Group, memory_bytes: int, processes: int) -> None:
        """The stopped states keep what they have; beside them and the slot, a fork is underway or a number is asked
        for by a thread (`session_processes.newest_pid`)."""
        group.limit(group.usage() + memory_bytes + HEADROOM_BYTES, processes + len(self.states) + 2)

    def answered(self, response: Response, reusable: bool) -> None:
        self.dead = not reusable
        self.done(None)
        self.answer(response)

    def answer(self, response: Response | None) -> None:
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(response)

    def connection_lost(self, error: Exception | None) -> None:
        self.dead = True
        if not self.hello.done():
            self.hello.set_result({"problem": "the slot died while starting"})
        self.crew.tell({"lost": self.number})
        self.done(None)
        self.answer(None)
        self.on_gone(self)
