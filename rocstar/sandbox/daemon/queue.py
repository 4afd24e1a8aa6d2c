"""The daemon's one queue: receives frames, starts programs and cells, sends exactly one answer to each.

Callers share the time of slots (`turns`), and calls of one caller start in order of arrival: a call is next even if two
hundred of another caller came before it. A call whose tier has no idle worker does not delay calls of other tiers.
At most `slots` programs and cells of all tiers run at once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from contextlib import suppress
from functools import partial

from msgspec import structs

from rocstar.sandbox import check, wire
from rocstar.sandbox.call import (
    Call,
    DaemonInfo,
    DaemonSettings,
    ProgramOutcome,
    Response,
    ServiceOutcome,
    Usage,
    failed,
    fault,
)
from rocstar.sandbox.daemon.pool import BARE, Pool, Pools
from rocstar.sandbox.daemon.sessions import NotebookSession, Sessions
from rocstar.sandbox.daemon.turns import Callers, Line, Queued
from rocstar.sandbox.daemon.worker import ProgramRun
from rocstar.sandbox.wire import FrameKind

MAX_MOVES = 10  # of a call from slot to slot before it has started
MAX_WAITING_BYTES = 2**30  # of unanswered calls
MAX_UNSENT_BYTES = 16 * 2**20  # of answers that the client does not read; above it no call is started
USAGE_SECONDS = 0.2  # between two usage reports


class Queue(asyncio.Protocol):
    """Consumes frames from the client; produces one RESPONSE or LOST for each CALL. A call waits for an idle worker of
    its tier, a cell for the earlier cells of its session; it is unblocked by an answer, a new worker, its cancellation,
    or the end of its patience. While the client reads no answers, no call is started."""

    transport: asyncio.WriteTransport

    def __init__(self, settings: DaemonSettings, info: DaemonInfo, pools: Pools) -> None:
        self.settings, self.info, self.pools = settings, info, pools
        self.loop = asyncio.get_running_loop()
        self.gone = asyncio.Event()
        self.reader = wire.FrameReader()
        self.calls: dict[int, Queued] = {}
        """Unanswered calls, by their number on the connection."""
        self.places: dict[Pool | NotebookSession, None] = {}
        """The pools and sessions that calls may be waiting for."""
        self.orders = itertools.count()
        self.callers = Callers()
        self.running = self.bytes = 0
        self.blocked = False
        self.usage_timer: asyncio.TimerHandle | None = None
        self.sessions = Sessions(settings, pools, self.finish, self.leave, self.report_later)
        pools.on_change = self.rearrange

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # it is a WriteTransport
        self.transport.set_write_buffer_limits(MAX_UNSENT_BYTES)
        self.write(FrameKind.HELLO, body=wire.encode(self.info))

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        self.dispatch()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, number, body in self.reader.feed(data):
                if kind is FrameKind.CALL:
                    self.accept(number, body)
                elif kind is FrameKind.CANCEL:
                    self.cancel(number)
                elif kind is FrameKind.PING:
                    self.send_usage()
                elif kind is FrameKind.CLOSE:
                    with suppress(ValueError):  # a body that is not text names no session
                        self.sessions.close(wire.decode_text(body))
        except ValueError:  # these bytes are not frames, so the peer is not our client
            self.transport.abort()
        self.dispatch()

    # Calls on their way in

    def accept(self, number: int, body: bytes) -> None:
        """Queue a call, or answer why it is not run."""
        call = Call(id="", code="")
        try:
            call = wire.decode_call(body)
            refusal = check.complaint(call)
        except (ValueError, RecursionError) as error:
            refusal = f"the call cannot be read ({error})"[:1000]
        if number in self.calls:
            refusal = f"number {number} is that of another call on this connection"
        outcome: ProgramOutcome | ServiceOutcome = ProgramOutcome.REJECTED
        waiting = len(self.calls) - self.running
        caller = self.callers.come(wire.caller_of(number))
        # A full queue still accepts calls of a caller with less than an equal share, so that none can block the others.
        has_share = caller.calls * self.callers.active > self.settings.max_queue + self.settings.slots
        is_full = waiting >= self.settings.max_queue and has_share
        if not refusal and (is_full or self.bytes + len(body) > MAX_WAITING_BYTES):
            outcome, refusal = ServiceOutcome.OVERLOADED, f"{waiting} calls are waiting already; try again later"
        if refusal:
            self.callers.leave(caller)
            self.send(number, failed(call.id, outcome, refusal))
            return
        queued = self.calls[number] = Queued(number, next(self.orders), caller, call, len(body))
        self.bytes += queued.size
        self.wait(queued)
        self.report_later()

    def wait(self, queued: Queued) -> None:
        """Queue a call, for as long as its patience lasts."""
        queued.timer = self.loop.call_later(queued.call.patience_seconds, self.expire, queued)
        self.place(queued)

    def place(self, queued: Queued) -> None:
        """Queue a call for a worker of its tier, or for its session."""
        call = queued.call
        place = self.sessions.find(queued) if call.session else self.pools.choose(call.code)
        if place is not None:
            self.places[place] = None
            place.line.push(queued)

    def cancel(self, number: int) -> None:
        queued = self.calls.get(number)
        if queued is not None and queued.run is not None:
            queued.run.stop("cancelled")
        elif queued is not None:
            self.finish(queued, failed(queued.call.id, ServiceOutcome.CANCELLED, ""))

    def expire(self, queued: Queued) -> None:
        reason = f"its turn did not come within its patience of {queued.call.patience_seconds:g} seconds"
        self.finish(queued, failed(queued.call.id, ServiceOutcome.OVERLOADED, reason))

    # Their turn

    def dispatch(self) -> None:
        """Start the calls that can run now."""
        while self.running < self.settings.slots and not self.blocked:
            found = self.next_call()
            if found is None:
                return
            queued, place = found
            self.begin(queued, place)
            if isinstance(place, NotebookSession):
                self.sessions.start(place, queued)
            else:
                worker = place.idle.pop()  # the most recently used, whose memory is in the CPU's caches
                run = ProgramRun(queued.call, worker, self.settings.grace_seconds, partial(self.ran, queued))
                queued.run = run
                run.start()

    def next_call(self) -> tuple[Queued, Pool | NotebookSession] | None:
        """The next call that can start now, and its pool or session. Pools without an idle worker start more."""
        now = time.monotonic()
        ready = []
        for place in [*self.places]:
            queued = place.line.first(now)
            if queued is None:
                del self.places[place]
            elif place.free:
                ready.append((queued.caller.used(now), queued.order, queued, place))
            elif isinstance(place, Pool):
                room = self.settings.slots - self.running
                place.start_workers(len([*itertools.islice(place.line, room)]))
        return min(ready)[2:] if ready else None

    def begin(self, queued: Queued, place: Pool | NotebookSession) -> None:
        now = time.monotonic()
        place.line.take(queued)
        self.running += 1
        self.callers.start(queued.caller, now)
        queued.queue_seconds += now - queued.arrived
        if queued.timer is not None:
            queued.timer.cancel()

    def ran(self, queued: Queued, response: Response | None) -> None:
        """A plain call has ended. None: its program was not started, and the call is queued again for another slot."""
        queued.run = None
        queued.moves += 1
        # Each slot may be stale: after a program that has started processes it starts no other.
        if response is None and queued.moves > MAX_MOVES + self.settings.slots:
            response = fault(queued.call.id, f"{queued.moves} slots in a row could not start it")
        if response is not None:
            self.finish(queued, response)
        else:
            queued.arrived = time.monotonic()
            self.wait(queued)
        self.leave(queued)

    def leave(self, queued: Queued) -> None:
        """A program or a cell has ended."""
        self.running -= 1
        queued.caller.change_running(-1, time.monotonic())
        self.dispatch()

    def rearrange(self) -> None:
        """A worker or a zygote has started or ended. Calls for a tier that cannot start go to the next cheaper one."""
        for place in [*self.places]:
            if isinstance(place, Pool) and place.problem and place.tier is not BARE:
                stranded, place.line = place.line, Line()
                for queued in stranded:
                    self.place(queued)
        self.dispatch()

    # Answers

    def finish(self, queued: Queued, response: Response | None) -> None:
        """Answer a call, unless it is answered already; None: its session is lost."""
        if queued.answered:
            return
        queued.answered = True
        del self.calls[queued.number]
        self.callers.leave(queued.caller)
        self.bytes -= queued.size
        if queued.timer is not None:
            queued.timer.cancel()
        if response is None:
            self.write(FrameKind.LOST, queued.number)
        else:
            self.send(queued.number, response, queued.queue_seconds)

    def send(self, number: int, response: Response, queue_seconds: float = 0.0) -> None:
        ran = isinstance(response.outcome, ProgramOutcome) and response.outcome is not ProgramOutcome.REJECTED
        level, failed = (self.info.isolation, self.info.failed_probes) if ran else ("", ())
        try:
            whole = structs.replace(
                response, queue_seconds=queue_seconds, isolation=level, failed_probes=failed, node=self.info.node
            )
            body = wire.encode(whole)
        except Exception as error:
            traceback.print_exc()
            body = wire.encode(fault(response.id, f"the answer could not be encoded ({type(error).__name__})"))
        self.write(FrameKind.RESPONSE, number, body)
        self.report_later()

    def write(self, kind: FrameKind, number: int = 0, body: bytes = b"") -> None:
        if not self.gone.is_set():
            self.transport.write(wire.pack(kind, number, body))

    def report_later(self) -> None:
        """Report the load within USAGE_SECONDS, once for several calls of this method."""
        if self.usage_timer is None:
            self.usage_timer = self.loop.call_later(USAGE_SECONDS, self.send_usage)

    def send_usage(self) -> None:
        if self.usage_timer is not None:
            self.usage_timer.cancel()
            self.usage_timer = None
        usage = Usage(
            cpu_seconds=time.process_time() + self.pools.cpu_seconds(),
            waiting=len(self.calls) - self.running,
            running=self.running,
            sessions=len(self.sessions.alive),
        )
        self.write(FrameKind.USAGE, body=wire.encode(usage))
