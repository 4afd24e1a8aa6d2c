"""The host's view of one tier: its nursery, and one `Lane` per slot (`lane`). A `Crew` starts slots when calls wait for
them and replaces those that died when others do."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rocstar.sandbox import jail, launcher, nursery, watch
from rocstar.sandbox.groups import Group, Groups
from rocstar.sandbox.jail import Plan
from rocstar.sandbox.lane import Lane
from rocstar.sandbox.tiers import Tier

NO_GROUPS: Mapping[str, tuple[str, ...]] = {"groups": (), "controllers": ()}
HELLO_SECONDS = 20.0  # a slot starts in milliseconds; a machine may be very busy
MAX_FAILED_STARTS = 5  # of slots in a row; then something is wrong with more than one slot
RETRY_SECONDS = 0.5  # where the machine had no room for another process
MAX_NURSERIES = 3  # in a row that brought no slot to life


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
    groups: Groups = field(default_factory=Groups)
    """Where memory and processes of whole calls are counted."""


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
        self.busy = False
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
                problem = await self.open_when_there_is_room(number)
                if not problem or not self.up:
                    return
                await asyncio.sleep(0.1 * (pause + 1))
            self.problem = problem
        finally:
            self.starting.discard(number)
            self.on_change()

    async def open_when_there_is_room(self, number: int) -> str:
        """As `open_lane`, but tried again for as long as the machine cannot start another process."""
        while True:
            problem = await self.open_lane(self.plan, number)
            if not self.busy or not self.up:
                return problem
            await asyncio.sleep(RETRY_SECONDS)

    async def open_lane(self, plan: Plan, number: int) -> str:
        """Start one slot; what went wrong, else nothing. `busy` tells whether it may go well later."""
        lane = Lane(number, self)
        hello = await self.raise_slot(lane, {"spawn": number, "plan": jail.PLANS.index(plan)})
        self.busy = bool(hello.get("busy"))
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
        group = self.group(lane.number)
        membership = {"groups": group.procs, "controllers": group.controllers} if group else NO_GROUPS
        with theirs:
            try:
                socket.send_fds(self.commands, [json.dumps({**command, **membership}).encode()], [theirs.fileno()])
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
        else:
            self.introduce(lane, hello, group)
        return hello

    def introduce(self, lane: Lane, hello: dict[str, Any], group: Group | None) -> None:
        """What counts for this slot. Where the number of processes can be watched, it is not missing any more."""
        lane.group = group if hello["groups"] else None
        lane.passed()  # what was killed with the slot before it is not held against the next call
        lane.unlimited = frozenset(hello["failed"]) & {"no_memory_cgroup", "no_process_limit"}
        if lane.unlimited and watch.can_see(hello["process"]):
            lane.process = hello["process"]
            hello["failed"] = [name for name in hello["failed"] if name != "no_process_limit"]

    def group(self, number: int) -> Group | None:
        """That of a slot. None where groups cannot be made any more, which the slot then says of itself."""
        try:
            return self.terms.groups.open(f"{self.index}-{number}")
        except OSError:
            return None

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
