"""The host's view of its slots: one `Lane` each, and the `Crew` that starts them, chooses how to isolate them by
trying, and replaces those that die."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.sandbox import jail, nursery, slotwire, verdict
from rocstar.sandbox.slotwire import Answer
from rocstar.sandbox.wire import Response, SandboxDown

HELLO_SECONDS = 20.0  # a slot starts in milliseconds; a machine may be very busy
MAX_FAILED_STARTS = 5  # in a row; then something is wrong with more than one slot

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
        self.watchdog = asyncio.get_running_loop().call_later(wall + self.crew.grace_seconds, self.give_up)

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
        self.done(verdict.response(self.request_id, answer, body, self.cpu_limit))
        if answer.reusable:
            self.crew.idle(self)

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
    """Keeps `size` slots alive. Waits on the nursery's socket at the start only; `failed` is set when slots can no
    longer be had, and nothing but a new host helps."""

    def __init__(self, commands: socket.socket, size: int, grace_seconds: float, skip_plans: int) -> None:
        self.commands = commands
        self.size = size
        self.grace_seconds = grace_seconds
        self.plans = jail.PLANS[skip_plans:]
        self.plan = jail.PLANS[-1]
        self.problems: list[str] = []
        self.walls_failed: tuple[str, ...] = ()
        self.ready: deque[Lane] = deque()
        self.lanes: dict[int, Lane] = {}
        self.past_cpu_seconds = 0.0
        self.starting: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self.on_idle: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Bring all slots up behind the strongest plan that works here. Raises SandboxDown."""
        self.commands.setblocking(False)
        said = await asyncio.get_running_loop().sock_recv(self.commands, nursery.MAX_COMMAND_BYTES)
        problem = json.loads(said)["problem"] if said else "the sandbox nursery died while preloading"
        if problem:
            raise SandboxDown(problem)
        await self.choose_plan()
        for number in range(1, self.size):
            if problem := await self.open_lane(number):
                raise SandboxDown(f"sandbox slot {number} did not start: {problem}")

    async def choose_plan(self) -> None:
        for plan in self.plans:
            self.plan = plan
            problem = await self.open_lane(0)
            if not problem:
                return
            self.problems.append(problem)
        raise SandboxDown(f"no sandbox slot can be started here: {'; '.join(self.problems)}")

    async def open_lane(self, number: int) -> str:
        """Start one slot; what went wrong, else nothing."""
        ours, theirs = socket.socketpair()
        command = json.dumps({"spawn": number, "plan": jail.PLANS.index(self.plan)}).encode()
        with theirs:
            try:
                socket.send_fds(self.commands, [command], [theirs.fileno()])
            except OSError as error:
                ours.close()
                return f"the sandbox nursery is gone ({error})"
        lane = Lane(number, self)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: lane, ours)
        try:
            hello = await asyncio.wait_for(asyncio.shield(lane.hello), HELLO_SECONDS)
        except TimeoutError:
            hello = {"problem": f"no sign of life within {HELLO_SECONDS} seconds"}
        if hello["problem"]:
            lane.transport.abort()
            self.kill(lane)
            return str(hello["problem"])
        self.walls_failed = tuple(hello["failed"])
        self.lanes[number] = lane
        self.idle(lane)
        return ""

    def take_idle(self) -> Lane | None:
        return self.ready.popleft() if self.ready else None

    def idle(self, lane: Lane) -> None:
        self.ready.append(lane)
        self.on_idle()

    def lost(self, lane: Lane) -> None:
        """Replace a slot that died; nobody waits for the replacement but the queue."""
        if self.lanes.get(lane.number) is not lane:
            return
        del self.lanes[lane.number]
        self.past_cpu_seconds += lane.cpu_seconds
        if lane in self.ready:
            self.ready.remove(lane)
        task = asyncio.create_task(self.replace(lane.number))
        self.starting.add(task)
        task.add_done_callback(self.starting.discard)

    async def replace(self, number: int) -> None:
        for pause in range(MAX_FAILED_STARTS):
            if not await self.open_lane(number):
                return
            await asyncio.sleep(0.1 * pause)
        self.failed.set()

    def kill(self, lane: Lane) -> None:
        try:
            self.commands.send(json.dumps({"kill": lane.number}).encode())
        except OSError:
            return  # the nursery is gone, and with it every slot

    def cpu_seconds(self) -> float:
        """CPU of all slots and programs so far, up to each slot's last answer, seconds."""
        return self.past_cpu_seconds + sum(lane.cpu_seconds for lane in self.lanes.values())
