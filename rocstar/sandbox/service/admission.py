"""Who runs next: a first-in, first-out queue with a deadline per call, in front of the sandbox.

Not here: HTTP, and how a program is run (`SandboxClient`). Every ticket ends with exactly one Response.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from rocstar.sandbox.service.ledger import Row
from rocstar.sandbox.wire import Outcome, ProgramOutcome, Request, Response, SandboxDown, ServiceOutcome

SWEEP_SECONDS = 0.25  # a deadline is kept to this much; going through 100,000 waiting calls takes a few milliseconds
RATE_SAMPLES = 256  # finished calls from which the pace is estimated
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 60


Run = Callable[[], Coroutine[Any, Any, Response]]


class Runner(Protocol):
    """What admission needs of a SandboxClient."""

    async def run(self, request: Request) -> Response: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A program is runnable while it is young. An old one sleeps or computes for long: it keeps its slot, and another
    may start beside it, so that a few endless loops do not hold up everybody else."""

    slots: int
    """Programs alive at once."""
    runnable: int
    """Young programs at once."""
    young_seconds: float
    """Age from which a program is old."""
    max_queue: int
    """Calls waiting at once."""

    def may_start(self, running: int, young: int) -> bool:
        return running < self.slots and young < self.runnable


class Ticket:
    """One call on its way: waiting, running, answered."""

    __slots__ = ("arrived", "deadline", "future", "request", "run", "task", "timer")

    def __init__(
        self, request: Request, arrived: float, deadline: float, future: asyncio.Future[Response], run: Run | None
    ) -> None:
        self.request = request
        self.run = run
        """How it is run; None for a plain call."""
        self.arrived = arrived
        self.deadline = deadline
        self.future = future
        self.task: asyncio.Task[Response] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Until it rings the program is young."""


class Admission:
    """Consumes tickets from `submit`, produces their responses. A ticket waits in `queue`; it is unblocked by a call
    that ends or grows old, by its deadline, or by `cancel`."""

    def __init__(self, runner: Runner, policy: Policy, row: Row) -> None:
        self.runner = runner
        self.policy = policy
        self.row = row
        self.queue: deque[Ticket] = deque()
        self.waiting = 0
        self.running = 0
        self.young = 0
        self.sweeper: asyncio.TimerHandle | None = None
        self.finished: deque[float] = deque(maxlen=RATE_SAMPLES)

    def submit(
        self, request: Request, patience_seconds: float, arrived: float | None = None, run: Run | None = None
    ) -> Ticket:
        """Put a call in the queue. `arrived` is when its caller sent it, by the monotonic clock; now, if not given.
        `run` is what its turn is for, where that is not a plain call of `request`."""
        arrived = time.monotonic() if arrived is None else arrived
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        ticket = Ticket(request, arrived, arrived + patience_seconds, future, run)
        if self.waiting >= self.policy.max_queue:
            self.refuse(ticket, f"{self.waiting} calls are waiting already")
            return ticket
        self.queue.append(ticket)
        self.waiting += 1
        self.dispatch()
        if self.waiting and self.sweeper is None:
            self.sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self.sweep)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The caller is gone: free its place or its slot. Does nothing to an answered ticket."""
        if ticket.future.done():
            return
        if ticket.task is not None:
            ticket.task.cancel()
        else:
            self.waiting -= 1  # it leaves the queue when it is next looked at
        self.finish(ticket, failed(ticket.request, ServiceOutcome.CANCELLED, "the caller went away"))

    async def outcome_for(self, ticket: Ticket) -> Response:
        """Its response. Cancelling the awaiting task cancels the ticket too."""
        try:
            return await asyncio.shield(ticket.future)  # the future has to be open still when the ticket is cancelled
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise

    def retry_after_seconds(self) -> int:
        """When it is worth to come again, whole seconds: the time the queue needs at the pace of late."""
        if len(self.finished) < 2:
            return MIN_RETRY_SECONDS
        pace = len(self.finished) / max(time.monotonic() - self.finished[0], 1e-3)
        return min(max(math.ceil(self.waiting / pace), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def dispatch(self) -> None:
        """Start what may start."""
        now = time.monotonic()
        while self.queue and self.policy.may_start(self.running, self.young):
            ticket = self.queue.popleft()
            if ticket.future.done():
                continue
            self.waiting -= 1
            if ticket.deadline < now:
                self.expire(ticket, now)
            else:
                self.start(ticket, now)
        self.row["waiting"] = self.waiting
        self.row["running"] = self.running

    def start(self, ticket: Ticket, now: float) -> None:
        self.running += 1
        self.young += 1
        loop = asyncio.get_running_loop()
        ticket.timer = loop.call_later(self.policy.young_seconds, self.grow_old, ticket)
        ticket.task = loop.create_task(self.carry_out(ticket, now - ticket.arrived))
        ticket.task.add_done_callback(partial(self.ended, ticket))

    async def carry_out(self, ticket: Ticket, waited: float) -> Response:
        try:
            response = await (self.runner.run(ticket.request) if ticket.run is None else ticket.run())
        except SandboxDown as error:
            return failed(ticket.request, ServiceOutcome.INTERNAL, str(error), waited)
        return replace(response, queue_seconds=response.queue_seconds + waited)

    def ended(self, ticket: Ticket, task: asyncio.Task[Response]) -> None:
        self.running -= 1
        if ticket.timer is not None:
            ticket.timer.cancel()
            ticket.timer = None
            self.young -= 1
        if not task.cancelled():
            self.finish(ticket, self.outcome_of(task, ticket.request))
        self.dispatch()

    def outcome_of(self, task: asyncio.Task[Response], request: Request) -> Response:
        error = task.exception()
        if error is None:
            return task.result()
        # A bug of ours, told to the log; the caller must not wait for ever because of it.
        asyncio.get_running_loop().call_exception_handler({"message": "a call failed", "exception": error})
        return failed(request, ServiceOutcome.INTERNAL, f"the service failed: {error!r}")

    def grow_old(self, ticket: Ticket) -> None:
        ticket.timer = None
        self.young -= 1
        self.dispatch()

    def sweep(self) -> None:
        """Answer the calls whose deadline has passed, drop those that are answered, look again while any wait."""
        now = time.monotonic()
        kept: deque[Ticket] = deque()
        for ticket in self.queue:
            if ticket.future.done():
                continue
            if ticket.deadline >= now:
                kept.append(ticket)
            else:
                self.waiting -= 1
                self.expire(ticket, now)
        self.queue = kept
        self.row["waiting"] = self.waiting
        loop = asyncio.get_running_loop()
        self.sweeper = loop.call_later(SWEEP_SECONDS, self.sweep) if kept else None

    def expire(self, ticket: Ticket, now: float) -> None:
        waited = now - ticket.arrived
        self.refuse(ticket, f"it waited {waited:.1f} s for its turn, which is all the patience it came with", waited)

    def refuse(self, ticket: Ticket, why: str, waited: float = 0.0) -> None:
        message = f"{why}; come again in {self.retry_after_seconds()} s"
        self.finish(ticket, failed(ticket.request, ServiceOutcome.OVERLOADED, message, waited))

    def finish(self, ticket: Ticket, response: Response) -> None:
        if ticket.future.done():
            return
        ticket.future.set_result(response)
        self.row.add(str(response.outcome))
        if isinstance(response.outcome, ProgramOutcome):
            self.finished.append(time.monotonic())
            self.row.observe("queue", response.queue_seconds)
            self.row.observe("run", response.run_seconds)


def failed(request: Request, outcome: Outcome, message: str, waited: float = 0.0) -> Response:
    """A response for a program that was not run."""
    return Response(id=request.id, outcome=outcome, message=message, queue_seconds=waited)
