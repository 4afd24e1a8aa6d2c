"""The session manager: notebooks, each one live process in a slot of its own.

It holds no history: a session that was ended (idle for too long, pushed out by another, its process gone) is lost, and
the next cell is told so. Cells of one session run one after another; each counts among the programs that run at once
(`queue`). When a cell is over, every other process of its session is killed before it is answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from msgspec import structs

from rocstar.sandbox.call import (
    Call,
    DaemonSettings,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
)
from rocstar.sandbox.daemon import verdict, watch
from rocstar.sandbox.daemon.worker import Pipes, Run, Worker
from rocstar.sandbox.slot import channel
from rocstar.sandbox.slot.channel import Cell, Ended, Notebook

INTERRUPT_SECONDS = 1.0  # for a cell to end itself after KeyboardInterrupt; then its process is killed
SWEEP_PAUSE = 0.001  # for what was killed to die
SWEEP_SECONDS = 2.0  # hostile forks can be born faster than they are found; then the session ends
MAX_LOOK_SECONDS = 10.0  # between looks for idle sessions


class QueuedCell(Protocol):
    """A cell that waits or runs, as the queue knows it."""

    call: Call
    run: Run | None
    """Set while it runs, so that it can be cancelled."""
    answered: bool


class Queue(Protocol):
    """What sessions need of the queue."""

    def ready(self, cell: QueuedCell) -> None:
        """Give it to `Sessions.start` when its turn comes, unless it is answered by then: then to `Sessions.skip`."""

    def finish(self, cell: QueuedCell, response: Response | None) -> None:
        """Answer it, with None that its session is lost. Harmless when it is answered already."""

    def leave(self) -> None:
        """One that was started runs no more."""


class Session:
    """One notebook: idle, or with one cell under way and others waiting for it."""

    def __init__(self, call: Call) -> None:
        self.name, self.limits = call.session, call.limits
        self.waiting: deque[QueuedCell] = deque()
        self.current: QueuedCell | None = None
        """Given to the queue, or running."""
        self.started = False
        """Whether the current one is running."""
        self.worker: Worker | None = None
        self.pipes: Pipes | None = None
        self.run: CellRun | None = None
        self.used = time.monotonic()

    def complaint(self, limits: Limits) -> str:
        """Memory and processes are those of the whole session."""
        for name in ("memory_bytes", "processes"):
            ours, theirs = getattr(self.limits, name), getattr(limits, name)
            if ours != theirs:
                return f"limit {name} of this session was set to {ours} by its first cell, got {theirs}"
        return ""


class CellRun(Run):
    """One cell. It is interrupted at its limit; if that does not help, its process is killed."""

    def __init__(
        self, call: Call, worker: Worker, grace_seconds: float, done: Callable[[Response | None], None]
    ) -> None:
        self.measures = ((self.interrupt, INTERRUPT_SECONDS), (worker.stop, grace_seconds))
        self.notebook = 0
        self.over = False
        """The cell has reported; only processes it left are still being killed."""
        super().__init__(call, worker, done)

    def start(self, pipes: Pipes) -> None:
        limits = self.call.limits
        self.find_notebook()
        self.cpu_before = watch.cpu_seconds_with_children(self.notebook)
        pipes.room[0] = limits.output_bytes
        self.begin(pipes)
        pipes.listen_for_report(self.reported)
        fetch = list(self.call.fetch)
        cell = Cell(self.call.cell, self.call.code, self.call.files, fetch, limits.cpu_seconds, limits.output_bytes)
        pipes.send(channel.pack(cell))

    def listen(self) -> None:
        self.pipes.listen_to_output(partial(self.stop, "output"))

    def find_notebook(self) -> int:
        """The slot's first child. 0 where it cannot be seen, or is not there yet."""
        if not self.notebook:
            self.notebook = next(iter(watch.children(self.worker.process)), 0)
        return self.notebook

    def interrupt(self) -> None:
        if self.find_notebook():
            with suppress(OSError):
                os.kill(self.notebook, signal.SIGINT)

    def stop(self, reason: str) -> None:
        if not self.over:
            super().stop(reason)

    def reported(self) -> None:
        self.over = True
        self.timer.cancel()
        self.seconds = self.age()
        self.sweep()

    def sweep(self) -> None:
        """Kill what the cell has started, as often as it takes."""
        if not self.find_notebook() or watch.kill_others(self.worker.process, self.notebook):
            self.guarded(self.conclude)
        elif self.age() > self.seconds + SWEEP_SECONDS:
            self.reason = self.reason or "processes"
            self.worker.give_up()
            self.on_ended(None)
        else:
            self.timer = self.worker.loop.call_later(SWEEP_PAUSE, self.sweep)

    def conclude(self) -> None:
        """Answer; the session goes on."""
        cpu = watch.cpu_seconds_with_children(self.notebook)
        self.worker.cpu_seconds = cpu + watch.cpu_seconds(self.worker.process)
        usage = (self.seconds, cpu - self.cpu_before, watch.peak_bytes(self.notebook))
        self.pipes.rest()
        self.answer(verdict.cell(self.call, self.seen(self.reason, *usage)))

    def ended(self, ended: Ended | None) -> None:
        """The process is gone, and the session with it."""
        used = ended.cpu_seconds - self.cpu_before if ended else 0.0
        seen = self.seen(self.reason, self.age(), used, ended.peak_memory_bytes if ended else 0)
        if ended is None and not seen.reason:
            response = verdict.fault(self.call.id, "the slot of its session died")
        else:
            own = ended and ended._replace(own_cpu_seconds=ended.own_cpu_seconds - self.cpu_before)
            response = verdict.program(self.call, seen, own)
        self.answer(structs.replace(response, state_lost=True))


class Sessions:
    """Consumes cells from `submit`, `start` and `skip`, and names of sessions from `close`; every cell is answered
    through the queue once. A cell waits for those of its session before it, for its turn, and for its slot to start."""

    def __init__(
        self, settings: DaemonSettings, queue: Queue, open_worker: Callable[[str], Awaitable[Worker]]
    ) -> None:
        """open_worker: starts a slot for a session that begins with this code; raises SandboxDown."""
        self.settings, self.queue, self.open_worker = settings, queue, open_worker
        self.alive: dict[str, Session] = {}
        self.opening: set[asyncio.Task[None]] = set()
        self.timer: asyncio.TimerHandle | None = None

    def submit(self, cell: QueuedCell) -> None:
        """Cell 1 starts a session, anew where there is one of this name."""
        session = self.alive.get(cell.call.session)
        if cell.call.cell == 1:
            if session is not None:
                self.end(session)
            session = self.new(cell)
        elif session is None:
            self.queue.finish(cell, None)
        elif why := session.complaint(cell.call.limits):
            self.queue.finish(cell, Response(id=cell.call.id, outcome=ProgramOutcome.REJECTED, message=why))
            return
        if session is not None:
            session.waiting.append(cell)
            self.offer(session)

    def new(self, cell: QueuedCell) -> Session | None:
        """None, and the cell is answered, where there are too many that are busy."""
        if len(self.alive) >= self.settings.session_slots:
            idle = [each for each in self.alive.values() if each.current is None]
            if not idle:
                full = f"{len(self.alive)} sessions are running, which is all that may be; try again later"
                self.queue.finish(cell, Response(id=cell.call.id, outcome=ServiceOutcome.OVERLOADED, message=full))
                return None
            self.end(min(idle, key=lambda each: each.used))
        session = self.alive[cell.call.session] = Session(cell.call)
        self.look_later()
        return session

    def offer(self, session: Session) -> None:
        """Have the queue run its next cell, if none is under way."""
        while session.current is None and session.waiting:
            cell = session.waiting.popleft()
            if not cell.answered:
                session.current, session.started = cell, False
                self.queue.ready(cell)

    def skip(self, cell: QueuedCell) -> None:
        """It was answered before its turn came."""
        session = self.alive.get(cell.call.session)
        if session is not None and session.current is cell:
            session.current = None
            self.offer(session)

    def start(self, cell: QueuedCell) -> None:
        """Its turn has come."""
        session = self.alive[cell.call.session]
        session.started = True
        if session.pipes is None:
            task = asyncio.create_task(self.open(session, cell))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)
        else:
            self.run(session, cell)

    async def open(self, session: Session, cell: QueuedCell) -> None:
        """Start the session's slot and process; then its first cell."""
        limits = session.limits
        try:
            session.worker = worker = await self.open_worker(cell.call.code)
            if self.alive.get(session.name) is not session:
                raise SandboxDown("its session was closed")
            worker.limit(limits)
            pipes = Pipes(worker.loop, limits.output_bytes, verdict.MAX_LONG_REPORT_BYTES)
            session.pipes = pipes
            notebook = Notebook(self.seed(cell.call), limits.memory_bytes, limits.processes)
            worker.start(pipes, channel.RUN, channel.pack(notebook), partial(self.process_ended, session))
        except (OSError, SandboxDown) as error:
            self.done(session, cell, structs.replace(verdict.fault(cell.call.id, str(error)), state_lost=True))
            self.let_go(session)
        else:
            self.run(session, cell)

    def seed(self, call: Call) -> int:
        return int.from_bytes(os.urandom(8)) if call.seed is None else call.seed

    def run(self, session: Session, cell: QueuedCell) -> None:
        done = partial(self.done, session, cell)
        cell.run = session.run = CellRun(cell.call, session.worker, self.settings.grace_seconds, done)
        session.run.start(session.pipes)
        if cell.answered:  # cancelled while the slot was started
            session.run.stop("cancelled")

    def process_ended(self, session: Session, ended: Ended | None) -> None:
        if session.run is not None:
            session.run.on_ended(ended)
        else:
            self.end(session)

    def done(self, session: Session, cell: QueuedCell, response: Response | None) -> None:
        """A cell that was started has ended."""
        session.used = time.monotonic()
        session.current = session.run = cell.run = None
        if response is not None and response.state_lost:
            self.end(session)
        self.queue.finish(cell, response)
        self.queue.leave()
        if self.alive.get(session.name) is session:
            self.offer(session)

    def close(self, name: str) -> None:
        session = self.alive.get(name)
        if session is not None:
            self.end(session)

    def end(self, session: Session) -> None:
        """Its names and files go; cells that wait are told so."""
        if self.alive.get(session.name) is not session:
            return
        del self.alive[session.name]
        for cell in session.waiting:
            self.queue.finish(cell, None)
        session.waiting.clear()
        if session.current is not None and not session.started:
            self.queue.finish(session.current, None)
        if session.run is not None:
            cancelled = Response(id=session.run.call.id, outcome=ServiceOutcome.CANCELLED, message="session closed")
            session.run.answer(structs.replace(cancelled, state_lost=True))
        self.let_go(session)

    def let_go(self, session: Session) -> None:
        if session.worker is not None:
            session.worker.give_up()
        if session.pipes is not None:
            session.pipes.close()

    def look_later(self) -> None:
        if self.timer is None and self.alive:
            pause = min(self.settings.session_idle_seconds / 4, MAX_LOOK_SECONDS)
            self.timer = asyncio.get_running_loop().call_later(pause, self.end_idle)

    def end_idle(self) -> None:
        self.timer = None
        oldest = time.monotonic() - self.settings.session_idle_seconds
        for session in [each for each in self.alive.values() if each.current is None and each.used < oldest]:
            self.end(session)
        self.look_later()
