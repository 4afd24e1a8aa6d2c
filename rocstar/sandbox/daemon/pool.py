"""Worker pools: one for each tier of preloaded modules, with its zygote and the workers forked from that.

A tier's zygote is started for the first program that needs it, a worker when a call waits for one; dead workers are
replaced when calls need them. While the machine has no room for another process, the pool waits: it never falls back to
a weaker plan. Not here: the order of calls (`queue`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rocstar.sandbox import container, daemon
from rocstar.sandbox.call import DaemonSettings, Isolation, SandboxDown
from rocstar.sandbox.daemon import watch
from rocstar.sandbox.daemon.snapshot import Lineage
from rocstar.sandbox.daemon.turns import Line
from rocstar.sandbox.daemon.worker import Worker
from rocstar.sandbox.walls import plans
from rocstar.sandbox.walls.cgroups import ControlGroup, Groups
from rocstar.sandbox.walls.plans import Plan

HELLO_SECONDS = 20.0  # a slot starts in milliseconds; a machine may be very busy
MAX_HELLO_BYTES = 2**16
MAX_FAILED_STARTS = 5  # of slots in a row; then something is wrong with more than one slot
MAX_BUSY_TRIES = 10  # some seconds, when the plan is chosen
RETRY_SECONDS = 0.5  # after the machine had no room for another process
MAX_ZYGOTES = 3  # in a row without a started slot
CHOSEN_BY = 100_000  # characters of a program that its tier is chosen by: imports are at the top
OFFERED = {"numpy": ("numpy",), "sympy": ("numpy", "sympy")}
EVERYTHING = ("numpy", "sympy", "scipy", "pandas", "networkx", "sklearn", "statsmodels")
PARTS = {"scipy": ("scipy.integrate", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats")}
COMES_WITH = {"mpmath": "sympy"}
# The text of such a program does not show all of its imports.
HIDDEN = re.compile(r"\b(?:__import__|importlib|exec|eval|b64decode)\b")


class Tier(NamedTuple):
    """Modules that are loaded before programs are forked. Forking a process with numpy loaded takes longer than forking
    a bare one, and importing numpy a hundred times as long as either; a wrong choice costs only time."""

    name: str
    modules: tuple[str, ...]
    """Modules that its zygote imports, in this order."""


BARE = Tier("bare", ())


def offered_tiers(preload: Sequence[str]) -> tuple[Tier, ...]:
    """All tiers of this machine, cheapest first, skipping those with missing modules. `preload`: the operator's own
    list, an additional tier unless it equals one of ours."""
    parts = (part for name in EVERYTHING if installed(name) for part in (name, *PARTS.get(name, ())))
    tiers = {frozenset[str](): BARE}
    for name, modules in (("preload", tuple(preload)), *OFFERED.items(), ("everything", tuple(parts))):
        if name == "preload" or all(map(installed, modules)):
            tiers.setdefault(frozenset(modules), Tier(name, modules))
    return tuple(sorted(tiers.values(), key=lambda tier: len(tier.modules)))


def installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def chooser(tiers: Sequence[Tier]) -> Callable[[str], Tier]:
    """What picks one of these tiers by the names of packages in a program's text: the cheapest with every named
    package, else the one with most of them."""
    covered = {tier: frozenset(module.partition(".")[0] for module in tier.modules) for tier in tiers}
    names = frozenset[str]().union(*covered.values())
    aliases = {alias for alias, package in COMES_WITH.items() if package in names}
    words = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, names | aliases)))})\b") if names else None
    hidden = next((tier for tier in tiers if tier.name == "preload"), BARE)

    def choose(code: str) -> Tier:
        found = set(words.findall(code)) if words else set()
        if not found:
            return hidden if hidden is not BARE and HIDDEN.search(code) else tiers[0]
        needed = {COMES_WITH.get(name, name) for name in found}
        return max(tiers, key=lambda tier: (len(needed & covered[tier]), -len(tier.modules)))

    return choose


class Pool:
    """The workers of one tier. `start` starts the zygote; from then on `start_workers` starts workers."""

    def __init__(self, tier: Tier, pools: Pools) -> None:
        self.tier, self.pools = tier, pools
        self.name = f"{pools.order[tier]}"
        self.arena: list[int] | None = None
        self.problem = ""
        """Why no worker can be started any more; empty while one can."""
        self.up = False
        self.machine_full = False
        """The machine had no room for another process when the last worker was started."""
        self.idle: list[Worker] = []
        self.line = Line()
        """Calls that wait for one of the pool's workers."""
        self.workers: dict[int, Worker] = {}
        """All existing workers, by number."""
        self.starting: set[int] = set()
        """Numbers of workers for plain calls that are being started."""
        self.for_sessions: set[int] = set()
        """Numbers of sessions' workers, which do not count against the slots of plain calls."""
        self.zygote: subprocess.Popen[bytes] | None = None
        self.zygotes = 0
        self.past_cpu_seconds = self.zygote_cpu_seconds = 0.0

    @property
    def free(self) -> bool:
        """Whether a call can start now."""
        return bool(self.idle)

    async def start(self) -> None:
        """Start the zygote and watch it; sets `problem` on failure."""
        self.zygotes += 1
        settings = {"preload": self.tier.modules, "workdirs": f"{self.pools.workdirs}/{self.name}"}
        try:
            self.commands, self.zygote = daemon.start("rocstar.sandbox.slot.zygote", settings, socket.SOCK_SEQPACKET)
            hello = await first_message(self.commands, "the sandbox zygote died while preloading", None)
        except OSError as error:
            hello = {"problem": f"the sandbox zygote could not be started ({error})"}
        self.problem, self.arena = hello["problem"], hello.get("arena")
        self.up = not self.problem
        if self.up and self.zygote:
            self.pools.spawn(self.await_end(self.zygote))
        self.pools.changed()

    async def await_end(self, zygote: subprocess.Popen[bytes]) -> None:
        """Wait until the zygote and with it its slots have ended; start another."""
        with suppress(ConnectionResetError):  # it ended with unread messages
            await asyncio.get_running_loop().sock_recv(self.commands, 1)
        self.up = False
        self.commands.close()
        self.past_cpu_seconds += self.zygote_cpu_seconds
        self.zygote, self.zygote_cpu_seconds = None, 0.0
        zygote.kill()
        zygote.wait()
        if self.zygotes < MAX_ZYGOTES:
            await self.start()
        else:
            self.problem = f"the sandbox zygote died {self.zygotes} times"
            self.pools.changed()

    def start_workers(self, waiting: int) -> None:
        """Start a worker for each of so many waiting calls, as far as there are free slots."""
        live = sum(not worker.dead for own, worker in self.workers.items() if own not in self.for_sessions)
        room = self.pools.settings.slots - live - len(self.starting) if self.up else 0
        for _ in range(min(waiting - len(self.starting), room)):
            free = self.free_number()
            self.starting.add(free)
            self.pools.spawn(self.add(free))

    def free_number(self) -> int:
        taken = self.workers.keys() | self.starting | self.for_sessions
        return next(n for n in itertools.count() if n not in taken)

    async def add(self, number: int) -> None:
        """Start a worker; retry forever while the machine is full."""
        problem = await self.open_idle(self.pools.plan, number, MAX_FAILED_STARTS, math.inf)
        self.problem = problem or self.problem
        self.starting.discard(number)
        self.pools.changed()

    async def open_idle(self, plan: Plan, number: int, tries: int, busy_tries: float) -> str:
        """Start an idle worker. Returns "", or the problem after `tries` failures, or after `busy_tries` on a full
        machine."""
        failures = busy = 0
        while self.up:
            try:
                self.idle.append(await self.open(plan, number))
                return ""
            except SandboxDown as error:
                failures, busy = failures + (not self.machine_full), busy + self.machine_full
                if failures >= tries or busy >= busy_tries:
                    return str(error)
            await asyncio.sleep(RETRY_SECONDS if self.machine_full else 0.1 * failures)
        return self.problem

    async def open(self, plan: Plan, number: int) -> Worker:
        """A new worker. Raises SandboxDown; `machine_full` is then whether a later try may succeed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            counted = "memory" in self.pools.groups.folders
            self.command({"spawn": number, "plan": plans.PLANS.index(plan), "counted": counted}, theirs)
        hello = await first_message(ours, "the slot died while starting", HELLO_SECONDS)
        self.machine_full = bool(hello.get("busy"))
        if hello["problem"]:
            ours.close()
            self.command({"lost": number})
            raise SandboxDown(hello["problem"])
        self.zygotes = 0
        group = ControlGroup()
        if hello["may_count"]:
            with suppress(OSError):
                opened = self.pools.groups.open(f"{self.name}-{number}")
                opened.join(hello["slot"])
                group = opened
        worker = self.workers[number] = Worker(number, ours, hello, group, self.pools.shortages)
        settings = self.pools.settings
        worker.fair_share = min(1.0, container.cpus() / (settings.slots * settings.daemons))
        worker.disk = "" if plan.level >= Isolation.L3 else os.path.dirname(self.pools.workdirs)
        if self.zygote and self.arena and plan.namespaces:
            worker.origin = Lineage(self.zygote.pid, *self.arena)
        worker.group.killed()  # so that kills in the previous slot of this group do not count for the next call
        worker.on_idle, worker.on_lost = self.idle.append, self.lost
        return worker

    def lost(self, worker: Worker) -> None:
        """The worker's slot has ended. Another is started when a call needs it."""
        del self.workers[worker.number]
        self.for_sessions.discard(worker.number)
        self.past_cpu_seconds += worker.cpu_seconds + worker.keeper_cpu_seconds
        if worker in self.idle:
            self.idle.remove(worker)
        self.command({"lost": worker.number})
        self.pools.changed()

    def command(self, command: dict[str, Any], attached: socket.socket | None = None) -> None:
        with suppress(OSError):  # the zygote is gone, and with it every slot
            socket.send_fds(self.commands, [json.dumps(command).encode()], [attached.fileno()] if attached else [])

    def cpu_seconds(self) -> float:
        """CPU of the zygote, of slots and of programs until their last answers, seconds."""
        if self.zygote:
            self.zygote_cpu_seconds = max(self.zygote_cpu_seconds, watch.cpu_seconds(self.zygote.pid))
        for worker in self.workers.values():
            worker.keeper_cpu_seconds = max(worker.keeper_cpu_seconds, watch.cpu_seconds(worker.keeper))
        workers = sum(worker.cpu_seconds + worker.keeper_cpu_seconds for worker in self.workers.values())
        return self.past_cpu_seconds + self.zygote_cpu_seconds + workers


async def first_message(connection: socket.socket, otherwise: str, seconds: float | None) -> dict[str, Any]:
    """The first message of a zygote or a slot, with its descriptors in `attached`. If the process ends without one, its
    `problem` is `otherwise`."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), arrived.set)
    try:
        await asyncio.wait_for(arrived.wait(), seconds)
        data, attached, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1)
    except TimeoutError:
        return {"problem": f"no sign of life within {seconds} seconds"}
    except OSError:
        data = b""
    finally:
        loop.remove_reader(connection.fileno())
    return {**json.loads(data), "attached": attached} if data else {"problem": otherwise}


class Pools:
    """The pools of all tiers, with one plan."""

    def __init__(self, settings: DaemonSettings, workdirs: str, groups: Groups) -> None:
        """workdirs: folder for the work of slots without their own file system. groups: count the memory of whole
        calls."""
        self.settings, self.workdirs, self.groups = settings, workdirs, groups
        self.plan = plans.PLANS[-1]
        self.shortages = watch.Shortages()
        self.problems: list[str] = []
        """Reasons why stronger plans than the one in force could not be set up."""
        offered = offered_tiers(settings.preload)
        self.order = {tier: n for n, tier in enumerate(offered)}
        self.tier_of = chooser(offered)
        self.pools: dict[Tier, Pool] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        """Set when not even the bare tier can be started any more: a new daemon is needed."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a worker has started or ended, or a tier cannot be started."""

    async def start(self, permitted: Sequence[Plan]) -> Pool:
        """Start the bare tier with the first of these plans that works here, and the operator's own tier. Returns the
        bare pool. Raises SandboxDown."""
        own = tuple(self.settings.preload)
        first = [self.pool(tier) for tier in self.order if tier is BARE or tier.modules == own]
        await asyncio.gather(*(pool.start() for pool in first))
        for pool in first:
            if pool.problem:
                raise SandboxDown(pool.problem)
        bare = self.pools[BARE]
        for plan in permitted:
            problem = await bare.open_idle(plan, 0, 1, MAX_BUSY_TRIES)
            if not problem:
                self.plan = plan
                return bare
            self.problems.append(problem)
        raise SandboxDown(f"no sandbox slot can be started here: {'; '.join(self.problems)}")

    def choose(self, code: str) -> Pool:
        """The pool that should run a program; its zygote may still be starting."""
        tier = self.tier_of(code[:CHOSEN_BY])
        if tier not in self.pools:
            self.spawn(self.pool(tier).start())
        pool = self.pools[tier]
        return self.pools[BARE] if pool.problem else pool

    def pool(self, tier: Tier) -> Pool:
        return self.pools.setdefault(tier, Pool(tier, self))

    def changed(self) -> None:
        if self.pools[BARE].problem:
            self.failed.set()
        self.on_change()

    async def open_for_session(self, code: str) -> Worker:
        """A separate worker for a session that begins with this code. Raises SandboxDown."""
        while not (pool := self.choose(code)).up:
            if pool.problem:
                raise SandboxDown(pool.problem)
            await asyncio.sleep(RETRY_SECONDS / 10)
        number = pool.free_number()
        pool.for_sessions.add(number)
        try:
            return await pool.open(self.plan, number)
        except BaseException as error:
            pool.for_sessions.discard(number)
            if isinstance(error, SandboxDown):
                raise SandboxDown(f"the session could not be started ({error})") from None
            raise

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def workers(self) -> list[Worker]:
        """The workers of all pools, busy or idle."""
        return [worker for pool in self.pools.values() for worker in pool.workers.values()]

    def cpu_seconds(self) -> float:
        return sum(pool.cpu_seconds() for pool in self.pools.values())
