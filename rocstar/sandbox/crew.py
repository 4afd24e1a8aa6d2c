"""The host's view of one tier: its nursery, and one `Lane` per slot. A `Crew` starts slots when calls wait for them and
replaces those that died when others do."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rocstar.sandbox import jail, launcher, nursery, slotwire, verdict
from rocstar.sandbox.jail import Plan
from rocstar.sandbox.slotwire import Answer
from rocstar.sandbox.tiers import Tier
from rocstar.sandbox.wire import Response

HELLO_SECONDS = 20.0  # a slot starts in milliseconds; a machine may be very busy
MAX_FAILED_STARTS = 5  # of slots in a row; then something is wrong with more than one slot
MAX_NURSERIES = 3  # in a row that brought no slot to life

Callback = Callable[[Response | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all crews of a host have in common."""

    size: int
    """Slots of a tier, at most."""
    grace_seconds: float
    """A slot that has not answered so long after the deadline is stuck itself."""
    workdirs: str
    """Folder in which slots without a file system of their own work; made when the first one needs it."""
    compiled: bool
    """Whether the compiled fork path may be used."""


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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def run(self, message: Mapping[str, Any], payload: bytes, callback: Callback) -> None:
        self.callback = callback
        self.request_id = message["id"]
        self.cpu_limit = message["cpu_seconds"]
        wall = message["wall_seconds"]
        head = slotwire.REQUEST.pack(len(payload), wall, message["output_bytes"])
        self.transport.write(slotwire.RUN + head + payload)
        self.watchdog = asyncio.get_running_loop().call_later(wall + self.crew.terms.grace_seconds, self.give_up)

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
        response = verdict.response(self.request_id, answer, body, self.cpu_limit)
        if answer.reusable:
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


class Crew:
    """One tier. `start` brings the nursery up; from then on slots are started when `want` says so, up to
    `terms.size`. `problem` says why there can be none any more; `on_change` tells that a slot became idle, or that."""

    def __init__(self, tier: Tier, index: int, terms: Terms, on_change: Callable[[], None]) -> None:
        self.tier = tier
        self.index = index
        self.terms = terms
        self.on_change = on_change
        self.plan = jail.PLANS[-1]
        self.fork_path = ""
        self.problem = ""
        self.walls_failed: tuple[str, ...] = ()
        self.ready: list[Lane] = []
        self.lanes: dict[int, Lane] = {}
        self.starting: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.nursery: subprocess.Popen[bytes] | None = None
        self.nurseries = 0
        self.up = False
        self.past_cpu_seconds = 0.0

    async def start(self) -> None:
        """Bring up the nursery; `problem` is set when it cannot be."""
        self.nurseries += 1
        settings = {
            "preload": self.tier.modules,
            "workdirs": f"{self.terms.workdirs}/{self.index}",
            "compiled": self.terms.compiled,
        }
        try:
            self.commands, self.nursery = launcher.start_nursery(settings)
        except OSError as error:
            self.problem = f"the sandbox nursery could not be started ({error})"
            return
        said = await asyncio.get_running_loop().sock_recv(self.commands, nursery.MAX_COMMAND_BYTES)
        hello = json.loads(said) if said else {"problem": "the sandbox nursery died while preloading"}
        self.problem = hello["problem"]
        self.fork_path = hello.get("fork_path", "")
        self.up = not self.problem
        if self.up:
            self.spawn_task(self.mind_nursery())

    async def mind_nursery(self) -> None:
        """Waits for the nursery's end, which takes its slots along; starts another."""
        await asyncio.get_running_loop().sock_recv(self.commands, 1)
        self.up = False
        self.commands.close()
        assert self.nursery is not None
        self.nursery.kill()
        self.nursery.wait()
        if self.nurseries >= MAX_NURSERIES:
            self.problem = f"the sandbox nursery died {self.nurseries} times"
        else:
            await self.start()
        self.on_change()

    def want(self, number: int) -> None:
        """So many calls wait for this tier: start slots for them, as far as there is room."""
        room = self.terms.size - len(self.lanes) - len(self.starting) if self.up else 0
        for _ in range(min(number - len(self.starting), room)):
            self.replace(self.free_number())

    def free_number(self) -> int:
        return next(n for n in range(self.terms.size) if n not in self.lanes and n not in self.starting)

    def replace(self, number: int) -> None:
        self.starting.add(number)
        self.spawn_task(self.open_some(number))

    async def open_some(self, number: int) -> None:
        try:
            for pause in range(MAX_FAILED_STARTS):
                problem = await self.open_lane(self.plan, number)
                if not problem or not self.up:
                    return
                await asyncio.sleep(0.1 * (pause + 1))
            self.problem = problem
        finally:
            self.starting.discard(number)
            self.on_change()

    async def open_lane(self, plan: Plan, number: int) -> str:
        """Start one slot; what went wrong, else nothing."""
        lane = Lane(number, self)
        hello = await self.raise_slot(lane, {"spawn": number, "plan": jail.PLANS.index(plan)})
        if hello["problem"]:
            return str(hello["problem"])
        self.nurseries = 0
        self.walls_failed = tuple(hello["failed"])
        self.lanes[number] = lane
        self.ready.append(lane)
        return ""

    async def raise_slot(self, lane: Lane, command: Mapping[str, int]) -> dict[str, Any]:
        """Have the nursery start a slot for `lane`; what it says of itself, or its `problem`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.commands, [json.dumps(command).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                return {"problem": f"the sandbox nursery is gone ({error})"}
        await asyncio.get_running_loop().connect_accepted_socket(lambda: lane, ours)
        try:
            hello = await asyncio.wait_for(asyncio.shield(lane.hello), HELLO_SECONDS)
        except TimeoutError:
            hello = {"problem": f"no sign of life within {HELLO_SECONDS} seconds"}
        if hello["problem"]:
            lane.transport.abort()
            self.kill(lane)
        return hello

    def lost(self, lane: Lane) -> None:
        """A slot died. Another is started when a call needs it, and one may be waiting already."""
        if self.lanes.get(lane.number) is not lane:
            return
        del self.lanes[lane.number]
        self.past_cpu_seconds += lane.cpu_seconds
        if lane in self.ready:
            self.ready.remove(lane)
        self.tell({"lost": lane.number})
        self.on_change()

    def kill(self, lane: Lane) -> None:
        self.tell({"kill": lane.number})

    def tell(self, command: Mapping[str, int]) -> None:
        with suppress(OSError):  # the nursery is gone, and with it every slot
            self.commands.send(json.dumps(command).encode())

    def spawn_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cpu_seconds(self) -> float:
        """CPU of all slots and programs so far, up to each slot's last answer, seconds."""
        return self.past_cpu_seconds + sum(lane.cpu_seconds for lane in self.lanes.values())
