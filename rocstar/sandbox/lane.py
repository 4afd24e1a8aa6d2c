"""One slot, seen from the host: its calls go out and its answers come in here.

Not here: starting slots and replacing them (`crew`)."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rocstar.sandbox import nursery, slotwire, verdict
from rocstar.sandbox.groups import HEADROOM_BYTES, Group
from rocstar.sandbox.slotwire import Answer
from rocstar.sandbox.wire import Response

if TYPE_CHECKING:
    from rocstar.sandbox.crew import Crew

Callback = Callable[[Response | None], None]


class Lane(asyncio.Protocol):
    """One slot, seen from the host: idle, or busy with one call.

    Consumes the slot's bytes; produces one callback per call, with None when the slot died under it."""

    def __init__(self, number: int, crew: Crew) -> None:
        self.number = number
        self.crew = crew
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.received = bytearray()
        self.cpu_seconds = 0.0
        self.callback: Callback | None = None
        self.request_id = ""
        self.cpu_limit = 0.0
        self.watchdog: asyncio.TimerHandle | None = None
        self.group: Group | None = None
        self.process = 0
        self.started = math.inf
        self.memory_limit = self.processes_limit = 0
        self.unlimited: frozenset[str] = frozenset()
        self.stopped = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def run(self, message: Mapping[str, Any], payload: bytes, callback: Callback) -> None:
        self.callback = callback
        self.request_id = message["id"]
        self.cpu_limit = message["cpu_seconds"]
        wall = message["wall_seconds"]
        if not self.limited(message):
            self.give_up()
            return
        self.started, self.stopped = time.monotonic(), ""
        self.transport.write(slotwire.pack_run(message, payload))
        self.watchdog = asyncio.get_running_loop().call_later(wall + self.crew.terms.grace_seconds, self.give_up)

    def limited(self, message: Mapping[str, Any]) -> bool:
        """Set the limits of the whole call. False where the kernel does not take them: what is left of earlier calls
        in the slot is more than this one may use."""
        if self.unlimited:
            self.watched(message)
        if self.group is not None:
            try:
                self.limit(self.group, message["memory_bytes"], message["processes"])
            except OSError:
                return False
        return True

    def watched(self, message: Mapping[str, Any]) -> None:
        """What the kernel does not count: see `watch`."""
        self.memory_limit = message["memory_bytes"] if "no_memory_cgroup" in self.unlimited else 0
        self.processes_limit = message["processes"] + 2 if "no_process_limit" in self.unlimited else 0

    def limit(self, group: Group, memory_bytes: int, processes: int) -> None:
        """The slot itself is one process more."""
        group.limit(memory_bytes + HEADROOM_BYTES, processes + 1)

    def passed(self) -> str:
        """Which limit of the whole call was passed: `memory`, `processes` or none."""
        self.started = math.inf
        stopped, self.stopped = self.stopped, ""
        return "memory" if self.group is not None and self.group.killed() else stopped

    def stop(self, limit: str) -> None:
        """The call is over this limit, as `watch` has seen."""
        self.started = math.inf
        self.stopped = limit
        self.cancel()

    def cancel(self) -> None:
        """Ask the slot to end its call; its answer says CANCELLED unless the program was quicker."""
        self.transport.write(slotwire.CANCEL)

    def give_up(self) -> None:
        self.crew.kill(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.hello.done():
            self.read_hello()
        else:
            self.read_answer()

    def read_hello(self) -> None:
        size = nursery.HELLO.size
        if len(self.received) < size:
            return
        end = size + nursery.HELLO.unpack_from(self.received)[0]
        if len(self.received) >= end:
            self.hello.set_result(json.loads(self.received[size:end]))
            del self.received[:end]

    def read_answer(self) -> None:
        size = slotwire.ANSWER.size
        if len(self.received) < size:
            return
        answer = Answer(*slotwire.ANSWER.unpack_from(self.received))
        end = size + answer.body_bytes
        if len(self.received) < end:
            return
        body = bytes(self.received[size:end])
        del self.received[:end]
        self.cpu_seconds = answer.slot_cpu_seconds
        self.answered(verdict.response(self.request_id, answer, body, self.cpu_limit, self.passed()), answer.reusable)

    def answered(self, response: Response, reusable: bool) -> None:
        if reusable:
            self.crew.ready.append(self)
        self.done(response)

    def done(self, response: Response | None) -> None:
        if self.watchdog:
            self.watchdog.cancel()
        callback, self.callback = self.callback, None
        if callback:
            callback(response)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.hello.done():
            self.hello.set_result({"problem": "the slot died while starting"})
            return
        self.crew.lost(self)
        self.done(None)
