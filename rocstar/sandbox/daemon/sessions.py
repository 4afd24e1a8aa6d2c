"""The session manager: notebooks, each one live process in its own slot.

It keeps no history: a session that was ended (idle for too long, replaced by another, its process gone) is lost, and
the answer to its next cell is LOST. Cells of one session run one after another; each counts as a running program
(`queue`). After a cell, every other process of its session is killed before the cell is answered. A fork is a cell
that leaves the notebook waiting; each branch is a session that begins as its copy (`snapshot`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from rocstar.sandbox import wire
from rocstar.sandbox.call import (
    OF_LIMITS,
    Call,
    DaemonSettings,
    ForkRefused,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
    failed,
    fault,
)
from rocstar.sandbox.daemon import verdict, watch
from rocstar.sandbox.daemon.snapshot import Snapshot
from rocstar.sandbox.daemon.turns import Line, Queued
from rocstar.sandbox.daemon.worker import Pipes, RunningCall, Worker, seed
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import Become, CellPayload, Ended, Fork, NotebookPayload, Payload

if TYPE_CHECKING:
    from rocstar.sandbox.daemon.pool import Pools

INTERRUPT_SECONDS = 1.0  # for a cell to end itself after KeyboardInterrupt; then its process is killed
MAX_INTERRUPTS = 3
FELT_SECONDS = 0.1  # of CPU: with less before or after its interrupt a cell may not have handled it
SWEEP_PAUSE = 0.001  # for killed processes to end
IDLE_CPU_SECONDS = 1.0  # for threads between two cells; beyond it they are stopped until the next one
MAX_PRELOADED_BYTES = 2**31  # copied in addition to a session's own memory
START_SECONDS = 10.0  # for a notebook to pack its files, or to become a copy; it takes milliseconds
KILLED = Response(id="", outcome=ProgramOutcome.SIGNAL, signal="SIGKILL")
BY_ITSELF = "the session's process ended by itself after its last cell; this cell was not run\n"
GONE = Response(id="", outcome=ProgramOutcome.EXIT_NONZERO, exit_code=1, stderr=BY_ITSELF, state_lost=True)
MOST_SWEEPS = 2000  # a hostile program may fork faster than its processes are found; then the session ends


class NotebookSession:
    """One notebook: free, or running one cell."""

    worker: Worker | None = None
    pipes: Pipes | None = None
    run: CellRun | None = None
    free = True
    notebook = 0
    """Its process id, and the CPU that it had used when its last cell ended; 0 before that."""
    cpu_seconds = 0.0
    seed = 0
    cells = 0
    """Cells run so far."""
    forked = 0
    """Branches made from it."""
    ended = False
    """Its process has ended between two cells, by itself."""
    shortages = (0, 0)
    """`Shortages.counts` at the end of its last cell."""

    def __init__(self, name: str, code: str, limits: Limits, owner: int) -> None:
        """code: its first cell, which decides its tier. owner: `wire.caller_of` that cell."""
        self.name, self.code, self.limits, self.owner, self.used = name, code, limits, owner, time.monotonic()
        self.line = Line()
        """Cells that wait for this session."""

    def is_idle(self) -> bool:
        return self.free and all(cell.answered for cell in self.line)

    def has_overspent(self) -> bool:
        """Whether the session has used too much CPU between two cells."""
        return self.notebook > 0 and watch.cpu_seconds(self.notebook) > self.cpu_seconds + IDLE_CPU_SECONDS

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its process, if that has begun and is still there."""
        if self.notebook:
            with suppress(OSError):
                os.kill(self.notebook, number)


class CellRun(RunningCall):
    """One cell. It is interrupted at its limit; if it does not end then, its process is killed."""

    notebook = 0
    """The id of the session's process, once it is known."""
    over = False
    """The cell has reported; processes that it started are still being killed."""

    def __init__(self, call: Call, worker: Worker, grace: float, done: Callable[[Response | None], None]) -> None:
        super().__init__(call, worker, self.endings(grace), done)

    def start(self, pipes: Pipes, payload: Payload) -> None:
        limits = self.call.limits
        self.own_cpu_before = self.own_cpu()
        self.cpu_before = watch.cpu_seconds(self.notebook, with_children=True)
        self.waited_before = {pid: watch.waited(pid) for pid in watch.descendants(self.worker.process)}
        pipes.room[0] = limits.output_bytes
        self.begin(pipes)
        pipes.watch(pipes.control, self.on_read)
        pipes.send(channel.pack(payload))

    def find_notebook(self) -> int:
        """The slot's first child; 0 if it is invisible, or not started yet."""
        self.notebook = self.notebook or next(iter(watch.children(self.worker.process)), 0)
        return self.notebook

    def endings(self, grace: float) -> Iterator[tuple[Callable[[], None], float]]:
        """Interrupt the cell, and kill its process a second later. The interrupt is repeated if other processes had the
        CPU, so that they do not cost the session its state: a notebook that waits for a CPU may receive its interrupt
        before the cell starts, where it has no effect, or have no time to end the cell."""
        cpu = [self.own_cpu_before, self.own_cpu()]
        for _ in range(MAX_INTERRUPTS):
            yield self.interrupt, INTERRUPT_SECONDS
            cpu.append(self.own_cpu())
            if min(cpu[-1] - cpu[-2], cpu[-2] - cpu[-3]) > FELT_SECONDS:
                break
        yield self.worker.stop, grace

    def own_cpu(self) -> float:
        return watch.cpu_seconds(self.find_notebook())

    def interrupt(self) -> None:
        if self.find_notebook():
            with suppress(OSError):
                os.kill(self.notebook, signal.SIGINT)

    def stop(self, reason: str) -> None:
        if not self.over:
            super().stop(reason)

    def has_overspent(self) -> bool:
        """Whether one of its processes has used more CPU than its limit; those that an earlier cell did not wait for
        are dead."""
        alive = (pid for pid in watch.descendants(self.worker.process) if not watch.is_dead(pid))
        others = (watch.cpu_seconds(pid) for pid in alive if pid != self.notebook)
        return max([self.own_cpu() - self.own_cpu_before, *others]) > self.call.limits.cpu_seconds

    def on_read(self) -> None:
        super().on_read()
        if not self.over and self.pipes.has_report():
            self.over, self.seconds = True, self.age()
            self.timer.cancel()
            self.pipes.unwatch()
            self.sweep()

    def sweep(self, left: int = MOST_SWEEPS) -> None:
        """Kill the processes that the cell has started, repeatedly until none is left; then answer."""
        if not self.find_notebook() or watch.kill_others(self.worker.process, self.notebook):
            self.guarded(self.conclude)
        elif left:
            self.timer = self.worker.loop.call_later(SWEEP_PAUSE, self.sweep, left - 1)
        else:
            self.reason = self.reason or "processes"
            self.worker.give_up()
            self.on_ended(None)

    def conclude(self) -> None:
        """Answer the cell; the session continues."""
        cpu = watch.cpu_seconds(self.notebook, with_children=True)
        self.worker.cpu_seconds = cpu + watch.cpu_seconds(self.worker.process)
        peak = watch.numbers(self.notebook, "status").get("VmHWM", 0)
        self.answer(verdict.cell(self.call, self.seen(self.reason, self.seconds, cpu - self.cpu_before, peak)))

    def finish(self, ended: Ended | None) -> None:
        """The process has ended, and the session with it."""
        if ended is not None:
            before = self.cpu_before
            ended = ended._replace(
                cpu_seconds=ended.cpu_seconds - before, own_cpu_seconds=ended.own_cpu_seconds - before
            )
        usage = (ended.cpu_seconds, ended.peak_memory_bytes) if ended else (0.0, 0)
        seen = self.seen(self.reason, self.age(), *usage)
        died = fault(self.call.id, "the slot of its session died")
        response = died if ended is None and not seen.reason else verdict.program(self.call, seen, ended)
        self.answer(structs.replace(response, state_lost=True))


class Sessions:
    """All live sessions. Every cell is answered by `finish` exactly once. A cell waits in the queue for the earlier
    cells and for its turn, and here until its slot has started."""

    def __init__(
        self,
        settings: DaemonSettings,
        pools: Pools,
        finish: Callable[[Queued, Response | None], None],
        leave: Callable[[Queued], None],
        fewer: Callable[[], None],
    ) -> None:
        """finish: answers a cell, None: its session is lost; no-op if it is answered. leave: called when a started cell
        has ended. fewer: called when one of `alive` has ended."""
        self.settings, self.pools = settings, pools
        self.finish, self.leave, self.fewer = finish, leave, fewer
        self.alive: dict[str, NotebookSession] = {}

    def find(self, cell: Queued) -> NotebookSession | None:
        """The session that a cell must wait for; None when the cell was answered instead. Cell 1 starts a new session
        and ends an older one with the same name."""
        call = cell.call
        session = self.alive.get(call.session)
        if call.cell == 1:
            if session is not None:
                self.end(session)
            owner = wire.caller_of(cell.number)
            if not self.make_room(owner):
                full = f"{len(self.alive)} sessions are busy, which is all that there may be; try again later"
                self.finish(cell, failed(call.id, ServiceOutcome.OVERLOADED, full))
                return None
            session = self.alive[call.session] = NotebookSession(call.session, call.code, call.limits, owner)
        if session is None:
            self.finish(cell, None)
            return None
        for name in ("memory_bytes", "processes"):  # which are limited for the whole session
            ours, theirs = getattr(session.limits, name), getattr(call.limits, name)
            if ours != theirs:
                refusal = f"{OF_LIMITS}{name} of this session was set to {ours} by its first cell, got {theirs}"
                self.finish(cell, failed(call.id, ProgramOutcome.REJECTED, refusal))
                return None
        return session

    def make_room(self, owner: int, count: int = 1) -> bool:
        """Make room for `count` more sessions of this owner by ending idle ones: its own, or of an owner with as many;
        first the longest idle of the owner with most. Returns whether there is room; if not, none was ended."""
        owned = Counter(session.owner for session in self.alive.values())
        idle, ended = [session for session in self.alive.values() if session.is_idle()], []
        for _ in range(count):
            owned[owner] += 1
            if owned.total() > self.settings.session_slots:
                candidates = [each for each in idle if each.owner == owner or owned[each.owner] >= owned[owner]]
                if not candidates:
                    return False
                ended.append(min(candidates, key=lambda session: (-owned[session.owner], session.used)))
                idle.remove(ended[-1])
                owned[ended[-1].owner] -= 1
        for session in ended:
            self.end(session)
        return True

    def start(self, session: NotebookSession, cell: Queued) -> None:
        """Run a cell whose turn has come in the session's slot, which is started first if there is none."""
        session.free = False
        if session.ended:
            self.done(session, cell, structs.replace(GONE, id=cell.call.id))
        elif cell.call.branches:
            self.pools.spawn(self.fork(session, cell))
        elif session.pipes is not None:
            self.run(session, cell)
        else:
            self.pools.spawn(self.open(session, cell))

    async def open(self, session: NotebookSession, cell: Queued) -> None:
        """Start the session's slot and process, then its first cell."""
        limits, session.seed = session.limits, seed(cell.call)
        try:
            await self.begin(session, NotebookPayload(session.seed, limits.memory_bytes, limits.processes))
        except (OSError, SandboxDown) as error:
            self.stop(session)
            self.done(session, cell, structs.replace(fault(cell.call.id, str(error)), state_lost=True))
        else:
            self.run(session, cell)

    async def begin(self, session: NotebookSession, payload: Payload, zygote: int = 0) -> None:
        """Start the session's slot and process; from this zygote, if one is given. Raises OSError and SandboxDown."""
        session.worker = worker = await self.pools.open_for_session(session.code)
        if self.alive.get(session.name) is not session:
            raise SandboxDown("its session was closed")
        if zygote and (worker.origin is None or worker.origin.zygote != zygote):
            raise SandboxDown("the preloaded Python that the session began with is gone; open another session")
        worker.limit(session.limits)
        session.pipes = Pipes(worker.loop, session.limits.output_bytes, verdict.MAX_LONG_REPORT_BYTES)
        worker.start(session.pipes, channel.pack(payload), partial(self.process_ended, session))

    def run(self, session: NotebookSession, cell: Queued) -> None:
        call = cell.call
        session.cells += 1
        payload = CellPayload(session.cells, call.code, call.files, list(call.fetch), call.limits.output_bytes)
        cell.run = self.run_in(session, call, payload, partial(self.done, session, cell))
        if cell.answered:  # cancelled while the slot was started
            cell.run.stop("cancelled")

    def run_in(
        self, session: NotebookSession, call: Call, payload: Payload, done: Callable[[Response | None], None]
    ) -> CellRun:
        assert session.worker is not None and session.pipes is not None
        session.send_signal(signal.SIGCONT)  # `look` may have stopped it
        session.run = run = CellRun(call, session.worker, self.settings.grace_seconds, done)
        run.start(session.pipes, payload)
        return run

    async def fork(self, session: NotebookSession, cell: Queued) -> None:
        """Start the sessions that the call names as copies of this one: all or none."""
        call = cell.call
        branches: list[NotebookSession] = []
        try:
            response = await self.copy(session, cell, branches)
        except ForkRefused as error:
            response = failed(call.id, ProgramOutcome.REJECTED, str(error))
        except Exception as error:
            if not isinstance(error, (OSError, SandboxDown)):
                traceback.print_exc()
            response = fault(call.id, f"the session could not be forked ({error})")
        if response.outcome is not ProgramOutcome.OK or cell.answered:
            for branch in branches:
                self.end(branch)
        is_gone = self.alive.get(session.name) is not session
        self.done(session, cell, structs.replace(response, state_lost=response.state_lost or is_gone))

    async def copy(self, session: NotebookSession, cell: Queued, branches: list[NotebookSession]) -> Response:
        """Copy the waiting notebook, add the branches to `branches`; then it and they continue. Raises ForkRefused,
        OSError and SandboxDown."""
        call, worker, pipes = cell.call, session.worker, session.pipes
        if worker is None or pipes is None:
            raise ForkRefused("the session has run no cell yet; run one, or open several sessions")
        if worker.origin is None:
            raise ForkRefused("sessions are forked where slots have namespaces (L3), with glibc, only")
        with Snapshot(session.notebook, worker.origin) as snapshot:
            if session.notebook not in watch.children(worker.process):  # another process has its id now
                raise SandboxDown("its process is gone")
            waits: asyncio.Future[Response | None] = worker.loop.create_future()
            bounded = structs.replace(call, limits=structs.replace(call.limits, wall_seconds=START_SECONDS))
            cell.run = self.run_in(session, bounded, Fork(), waits.set_result)
            channel.send_descriptors(pipes.control.fd, [snapshot.files])
            response = await waits
            if response is None or response.outcome is not ProgramOutcome.OK:
                return response or fault(call.id, "its slot died")
            if response.state_lost:
                return structs.replace(GONE, id=call.id)
            session.run = cell.run = None  # from now on a cancellation is answered at once
            try:
                await asyncio.to_thread(snapshot.take, session.limits.memory_bytes + MAX_PRELOADED_BYTES)
            finally:
                if self.alive.get(session.name) is session:
                    pipes.send(channel.GO)
            if cell.answered:
                return response
            if taken := [name for name in call.branches if name in self.alive]:
                raise ForkRefused(f"there is a session {taken[0]!r} already; give another name")
            if not self.make_room(session.owner, len(call.branches)):  # last: a refused fork must end no other session
                most = self.settings.session_slots
                raise ForkRefused(
                    f"{len(call.branches)} branches pass the {most} sessions that there may be; close some"
                )
            for name in call.branches:
                self.alive[name] = branch = NotebookSession(name, session.code, session.limits, session.owner)
                branch.free, branch.cells = False, session.cells
                branches.append(branch)
                session.forked += 1
                identity = f"{session.seed} {session.forked}".encode()  # repeatable for the same session
                branch.seed = int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest())
            begun = [self.become(branch, snapshot) for branch in branches]
            for problem in filter(None, await asyncio.gather(*begun, return_exceptions=True)):
                raise problem
            return response

    async def become(self, session: NotebookSession, snapshot: Snapshot) -> None:
        """Start a branch's process, and turn it into the copy. Raises OSError and SandboxDown."""
        limits = session.limits
        bounds = limits.memory_bytes, limits.processes
        become = Become(*bounds, snapshot.folder, snapshot.umask, snapshot.size, len(snapshot.steps))
        await self.begin(session, become, snapshot.origin.zygote)
        assert session.pipes is not None and session.worker is not None
        both = (f"/proc/self/fd/{fd}" for fd in (snapshot.memory, snapshot.files))
        descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in both]  # with positions of the branch's own
        try:
            channel.send_descriptors(session.pipes.control.fd, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)
        bounded = structs.replace(limits, wall_seconds=START_SECONDS)
        call = Call(id="", code="", limits=bounded, session=session.name, branches=(session.name,))
        ready: asyncio.Future[Response | None] = session.worker.loop.create_future()
        self.run_in(session, call, NotebookPayload(session.seed, *bounds), ready.set_result)
        response = await ready
        self.set_free(session)
        if response is None or isinstance(response.outcome, ServiceOutcome):
            raise SandboxDown(f"a branch did not start: {response and (response.message or response.outcome)}")
        if response.state_lost or response.outcome is not ProgramOutcome.OK:
            raise ForkRefused(response.message or f"a branch ended as it began ({response.outcome})")

    def process_ended(self, session: NotebookSession, ended: Ended | None) -> None:
        """Between two cells: a process that its own threads, timers or memory have ended is no loss of the service."""
        assert session.worker is not None
        if session.run is not None:
            session.run.on_ended(ended)
        elif session.worker.group.killed() or (ended and not session.worker.blamed(KILLED, session.shortages)):
            session.ended, session.notebook = True, 0
        else:
            self.end(session)

    def done(self, session: NotebookSession, cell: Queued, response: Response | None) -> None:
        """A started cell has ended."""
        self.set_free(session)
        if response is not None and response.state_lost:
            self.end(session)
        self.finish(cell, response)
        self.leave(cell)

    def set_free(self, session: NotebookSession) -> None:
        """From now on the session waits for its next cell."""
        if session.run is not None:
            session.notebook, session.shortages = session.run.notebook, session.run.worker.shortages.counts
        session.cpu_seconds = watch.cpu_seconds(session.notebook)
        session.used, session.free, session.run = time.monotonic(), True, None

    def close(self, name: str) -> None:
        if name in self.alive:
            self.end(self.alive[name])

    def end(self, session: NotebookSession) -> None:
        """End a session with its names and files; waiting cells are answered LOST."""
        if self.alive.get(session.name) is not session:
            return
        del self.alive[session.name]
        self.fewer()
        for cell in session.line:
            self.finish(cell, None)
        if session.run is not None:
            closed = failed(session.run.call.id, ServiceOutcome.CANCELLED, "its session was closed")
            session.run.answer(structs.replace(closed, state_lost=True))
        self.stop(session)

    def stop(self, session: NotebookSession) -> None:
        """Kill the session's processes at once."""
        if session.worker is not None:
            session.worker.give_up()
        if session.pipes is not None:
            session.pipes.close()

    def look(self) -> None:
        """To be called regularly: end sessions that are idle for too long, and stop what exceeds its CPU limit: a cell,
        or threads between two cells, until the next one. The kernel's limit would be set in the session's process,
        where a cell could lift it."""
        now = time.monotonic()
        for session in [*self.alive.values()]:
            if session.run is not None and session.run.has_overspent():
                session.run.stop("cpu")
            elif session.free and session.notebook and session.worker is not None:  # a thread may start others
                watch.kill_others(session.worker.process, session.notebook)
                if session.has_overspent():
                    session.send_signal(signal.SIGSTOP)
            if session.is_idle() and now > session.used + self.settings.session_idle_seconds:
                self.end(session)
