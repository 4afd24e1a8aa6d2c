"""Worker pools: one for each tier of preloaded modules, with its zygote and the workers forked from that.

A tier's zygote is started when the first program asks for it, a worker when a call waits for one; those that die are
replaced when others are needed. A machine that has no room for another process is waited for: it never leads to a
weaker plan. Not here: which call runs next (`queue`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rocstar.sandbox import launch
from rocstar.sandbox.call import DaemonSettings, SandboxDown
from rocstar.sandbox.daemon import watch
from rocstar.sandbox.daemon.worker import Worker
from rocstar.sandbox.slot import tiers
from rocstar.sandbox.slot.tiers import Tier
from rocstar.sandbox.walls import plans
from rocstar.sandbox.walls.cgroups import Groups
from rocstar.sandbox.walls.plans import Plan

HELLO_SECONDS = 20.0  # a slot starts in milliseconds; a machine may be very busy
MAX_HELLO_BYTES = 2**16
MAX_FAILED_STARTS = 5  # of slots in a row; then something is wrong with more than one slot
MAX_BUSY_TRIES = 10  # some seconds, when the plan is chosen
RETRY_SECONDS = 0.5  # where the machine had no room for another process
MAX_ZYGOTES = 3  # in a row that brought no slot to life
MAX_SLOTS = 256  # of one zygote: each has a user of its own
CHOSEN_BY = 100_000  # characters of a program that its tier is chosen by: imports stand at the top


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all pools of a daemon have in common."""

    settings: DaemonSettings
    workdirs: str
    """Folder in which slots without a file system of their own work."""
    groups: Groups = field(default_factory=Groups)
    """Where memory and processes of whole calls are counted."""


class Pool:
    """The workers of one tier. `start` brings the zygote up; from then on workers are started when `want` says so, up
    to the number of slots. `problem` says why there can be none any more; `on_change` tells that a worker became idle
    without having run, or that one cannot be had."""

    def __init__(self, tier: Tier, index: int, terms: Terms, on_change: Callable[[], None]) -> None:
        self.tier, self.index, self.terms, self.on_change = tier, index, terms, on_change
        self.plan = plans.PLANS[-1]
        self.fork_path = ""
        self.problem = ""
        self.up = False
        self.full = False
        """The machine had no room for another process when the last worker was started."""
        self.walls_failed: tuple[str, ...] = ()
        self.idle: list[Worker] = []
        self.workers: dict[int, Worker] = {}
        """All that are not gone, by number."""
        self.starting: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.zygote: subprocess.Popen[bytes] | None = None
        self.zygotes = 0
        self.past_cpu_seconds = 0.0

    async def start(self) -> None:
        """Bring the zygote up; `problem` is set when it cannot be."""
        self.zygotes += 1
        settings = {
            "preload": self.tier.modules,
            "workdirs": f"{self.terms.workdirs}/{self.index}",
            "compiled": self.terms.settings.compiled,
        }
        try:
            self.commands, self.zygote = launch.start("rocstar.sandbox.slot.zygote", settings, socket.SOCK_SEQPACKET)
        except OSError as error:
            self.problem = f"the sandbox zygote could not be started ({error})"
            return
        first = await asyncio.get_running_loop().sock_recv(self.commands, MAX_HELLO_BYTES)
        hello = json.loads(first) if first else {"problem": "the sandbox zygote died while preloading"}
        self.problem, self.fork_path = hello["problem"], hello.get("fork_path", "")
        self.up = not self.problem
        if self.up:
            self.spawn(self.watch_zygote())

    async def watch_zygote(self) -> None:
        """Wait for the zygote's end, which takes its slots along; start another."""
        assert self.zygote is not None
        await asyncio.get_running_loop().sock_recv(self.commands, 1)
        self.up = False
        self.commands.close()
        self.past_cpu_seconds += watch.cpu_seconds(self.zygote.pid)
        self.zygote.kill()
        self.zygote.wait()
        if self.zygotes >= MAX_ZYGOTES:
            self.problem = f"the sandbox zygote died {self.zygotes} times"
        else:
            await self.start()
        self.on_change()

    def want(self, number: int) -> None:
        """So many calls wait for this tier: start workers for them, as far as there is room."""
        live = sum(not worker.dead for worker in self.workers.values())
        room = self.terms.settings.slots - live - len(self.starting) if self.up else 0
        for _ in range(min(number - len(self.starting), room)):
            number_taken = self.free_number()
            self.starting.add(number_taken)
            self.spawn(self.open_until_it_works(number_taken))

    def free_number(self) -> int:
        return next(n for n in range(MAX_SLOTS) if n not in self.workers and n not in self.starting)

    async def open_until_it_works(self, number: int) -> None:
        """Start a worker; a full machine is waited for without end."""
        problem = ""
        try:
            failures = 0
            while failures < MAX_FAILED_STARTS:
                worker, problem = await self.open(self.plan, number)
                if worker is not None:
                    self.idle.append(worker)
                    return
                if not self.up:
                    return
                failures += not self.full
                await asyncio.sleep(RETRY_SECONDS if self.full else 0.1 * failures)
            self.problem = problem
        finally:
            self.starting.discard(number)
            self.on_change()

    async def open(self, plan: Plan, number: int, *, session: bool = False) -> tuple[Worker | None, str]:
        """A new worker, or what went wrong; then `full` tells whether it may go well later. session: one whose programs
        are not made to give way to younger ones."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        group = None
        with suppress(OSError):  # then the slot says that it is not counted
            group = self.terms.groups.open(f"{self.index}-{number}")
        membership = {"groups": group.procs, "controllers": group.controllers} if group else NO_GROUP
        with theirs:
            self.tell({"spawn": number, "plan": plans.PLANS.index(plan), "session": session, **membership}, theirs)
        hello = await first_message(ours)
        self.full = bool(hello.get("busy"))
        if hello["problem"]:
            ours.close()
            self.tell({"lost": number})
            return None, str(hello["problem"])
        self.zygotes = 0
        worker = Worker(number, ours, hello, group if hello["groups"] else None)
        worker.passed()  # what was killed with the slot before it is not held against the next call
        worker.on_idle, worker.on_lost = self.idle.append, self.lost
        self.workers[number] = worker
        self.walls_failed = tuple(name for name in hello["failed"] if name != "no_process_limit" or "processes" not in worker.uncounted)
        return worker, ""

    def lost(self, worker: Worker) -> None:
        """Its slot has ended. Another is started when a call needs it."""
        del self.workers[worker.number]
        self.past_cpu_seconds += worker.cpu_seconds
        if worker in self.idle:
            self.idle.remove(worker)
        self.tell({"lost": worker.number})
        self.on_change()

    def tell(self, command: dict[str, Any], attached: socket.socket | None = None) -> None:
        with suppress(OSError):  # the zygote is gone, and with it every slot
            socket.send_fds(self.commands, [json.dumps(command).encode()], [attached.fileno()] if attached else [])

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cpu_seconds(self) -> float:
        """CPU of the zygote, of slots and of programs so far, as of their last answers, seconds."""
        zygote = watch.cpu_seconds(self.zygote.pid) if self.zygote else 0.0
        workers = sum(worker.cpu_seconds + watch.cpu_seconds(worker.keeper) for worker in self.workers.values())
        return self.past_cpu_seconds + zygote + workers


NO_GROUP: dict[str, Any] = {"groups": (), "controllers": ()}


async def first_message(slot: socket.socket) -> dict[str, Any]:
    """What a slot says of itself, or its `problem`."""
    receiving = asyncio.get_running_loop().sock_recv(slot, MAX_HELLO_BYTES)
    try:
        data = await asyncio.wait_for(receiving, HELLO_SECONDS)
    except TimeoutError:
        return {"problem": f"no sign of life within {HELLO_SECONDS} seconds"}
    except OSError:
        data = b""
    return dict(json.loads(data)) if data else {"problem": "the slot died while starting"}


class Pools:
    """The pools of all tiers, behind one plan. `failed` is set when not even the bare tier can be had any more, and
    nothing but a new daemon helps; `on_change`: see `Pool`."""

    def __init__(self, terms: Terms, permitted: Sequence[Plan]) -> None:
        """`permitted`: plans to be tried in this order."""
        self.terms, self.permitted = terms, permitted
        self.problems: list[str] = []
        """Why stronger plans than the one in force could not be had."""
        offered = tiers.offered(terms.settings.preload)
        self.order = {tier: n for n, tier in enumerate(offered)}
        self.chooser = tiers.Chooser(offered)
        self.pools: dict[Tier, Pool] = {}
        self.coming: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    async def start(self) -> Pool:
        """Bring up the bare tier behind the strongest plan that works here, and the operator's own; the bare one.

        Raises SandboxDown."""
        preload = tuple(self.terms.settings.preload)
        bare, *own = [self.add(tier) for tier in self.order if tier is tiers.BARE or tier.modules == preload]
        await asyncio.gather(*(pool.start() for pool in (bare, *own)))
        for pool in (bare, *own):
            if pool.problem:
                raise SandboxDown(pool.problem)
        self.plan = await self.choose_plan(bare)
        for pool in (bare, *own):
            pool.plan = self.plan
        return bare

    async def choose_plan(self, pool: Pool) -> Plan:
        for plan in self.permitted:
            problem = await self.try_plan(pool, plan)
            if not problem:
                return plan
            self.problems.append(problem)
        raise SandboxDown(f"no sandbox slot can be started here: {'; '.join(self.problems)}")

    async def try_plan(self, pool: Pool, plan: Plan) -> str:
        """What went wrong."""
        for _ in range(MAX_BUSY_TRIES):
            worker, problem = await pool.open(plan, 0)
            if worker is not None:
                pool.idle.append(worker)
            if not pool.full:
                break
            await asyncio.sleep(RETRY_SECONDS)
        return problem

    def choose(self, code: str) -> Pool:
        """The pool that should run a program; its zygote may still be coming up."""
        return self.usable(self.chooser.choose(code[:CHOSEN_BY]))

    def usable(self, tier: Tier) -> Pool:
        """This tier's pool, or where it cannot be had that of the next cheaper one."""
        pool = self.pools.get(tier)
        if pool is None:
            pool = self.add(tier)
            pool.plan = self.plan
            task = asyncio.create_task(self.bring_up(pool))
            self.coming.add(task)
            task.add_done_callback(self.coming.discard)
        if pool.problem and tier is not tiers.BARE:
            return self.usable(next(other for other, n in self.order.items() if n == self.order[tier] - 1))
        return pool

    def add(self, tier: Tier) -> Pool:
        self.pools[tier] = Pool(tier, self.order[tier], self.terms, self.changed)
        return self.pools[tier]

    async def bring_up(self, pool: Pool) -> None:
        await pool.start()
        self.changed()

    def changed(self) -> None:
        if self.pools[tiers.BARE].problem:
            self.failed.set()
        self.on_change()

    async def open_for_session(self, code: str) -> Worker:
        """A worker of its own for a session that begins with this code. Raises SandboxDown."""
        pool = self.choose(code)
        while not pool.up:
            await asyncio.sleep(RETRY_SECONDS / 10)
            pool = self.choose(code)
            if pool.problem:
                raise SandboxDown(pool.problem)
        number = next(n for n in range(MAX_SLOTS - 1, -1, -1) if n not in pool.workers and n not in pool.starting)
        pool.starting.add(number)
        try:
            worker, problem = await pool.open(pool.plan, number, session=True)
        finally:
            pool.starting.discard(number)
        if worker is None:
            raise SandboxDown(f"the session could not be started ({problem})")
        return worker

    def workers(self) -> list[Worker]:
        """All there are, busy or idle."""
        return [worker for pool in self.pools.values() for worker in pool.workers.values()]

    def cpu_seconds(self) -> float:
        return sum(pool.cpu_seconds() for pool in self.pools.values())
