"""A session's slot, seen from the host: one cell at a time, and which sessions stand at which of its states."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.sandbox import session_wire as sw
from rocstar.sandbox import slotwire, verdict
from rocstar.sandbox.crew import Crew, Lane
from rocstar.sandbox.session_wire import Order, Result
from rocstar.sandbox.slotwire import Answer
from rocstar.sandbox.wire import Response

Ended = tuple[Response, Result]


class SessionLane(Lane):
    """`refs`: the state of each session in it, `counts`: its committed cells; `busy`: held while a cell runs."""

    def __init__(self, number: int, crew: Crew, on_gone: Callable[[SessionLane], None]) -> None:
        super().__init__(number, crew)
        self.on_gone = on_gone
        self.refs: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.states = {sw.ROOT}
        self.numbers = itertools.count(sw.ROOT + 1)
        self.busy = asyncio.Lock()
        self.used = time.monotonic()
        self.dead = False
        self.answered: asyncio.Future[Ended | None] | None = None

    async def cell(self, message: Mapping[str, Any], order: Order) -> Ended | None:
        """Run it; None when the slot died."""
        if self.dead:
            return None
        self.answered = asyncio.get_running_loop().create_future()
        self.run(message, sw.pack_order(order), lambda response: None)
        try:
            return await self.answered
        finally:
            self.used = time.monotonic()

    def read_answer(self) -> None:
        size = slotwire.ANSWER.size
        if len(self.received) < size:
            return
        answer = Answer(*slotwire.ANSWER.unpack_from(self.received))
        body_end = size + answer.body_bytes
        start = body_end + sw.LENGTH.size
        if len(self.received) < start:
            return
        end = start + sw.LENGTH.unpack_from(self.received, body_end)[0]
        if len(self.received) < end:
            return
        body, result = bytes(self.received[size:body_end]), sw.parse_result(bytes(self.received[start:end]))
        self.received.clear()
        self.cpu_seconds = answer.slot_cpu_seconds
        self.dead = not answer.reusable
        self.done(None)
        self.answer((verdict.response(self.request_id, answer, body, self.cpu_limit), result))

    def answer(self, ended: Ended | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(ended)

    def connection_lost(self, error: Exception | None) -> None:
        self.dead = True
        if not self.hello.done():
            self.hello.set_result({"problem": "the slot died while starting"})
        self.crew.tell({"lost": self.number})
        self.done(None)
        self.answer(None)
        self.on_gone(self)
