"""The daemon's one queue: frames in, programs and cells started in the order they came, exactly one answer to each.

Of the calls that could start, the one that came first does; a call whose tier has no idle worker waits without holding
up those of other tiers. At most `slots` programs and cells run at once, whatever their tiers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec import structs

from rocstar.sandbox import check, wire
from rocstar.sandbox.call import Call, DaemonInfo, DaemonSettings, ProgramOutcome, Response, ServiceOutcome, Usage
from rocstar.sandbox.daemon import verdict
from rocstar.sandbox.daemon.pool import Pool, Pools
from rocstar.sandbox.daemon.sessions import QueuedCell, Sessions
from rocstar.sandbox.daemon.worker import ProgramRun, Run, Worker
from rocstar.sandbox.slot import channel, tiers
from rocstar.sandbox.slot.channel import Program
from rocstar.sandbox.wire import Frame, Kind

MAX_MOVES = 10  # of a call from slot to slot before anything of it ran
MAX_UNSENT_BYTES = 64 * 2**20  # answers that the client does not take; nothing more is started meanwhile
MAX_WAITING_BYTES = 2**30  # of the bodies of calls that wait
USAGE_SECONDS = 0.2  # between two reports of it
READ_BYTES = 2**18


class Queued:
    """A call in the daemon."""

    __slots__ = ("answered", "arrived", "call", "moves", "number", "order", "queue_seconds", "run", "size", "started", "timer")

    def __init__(self, number: int, order: int, call: Call, size: int) -> None:
        self.number, self.order, self.call, self.size = number, order, call, size
        self.arrived = time.monotonic()
        self.queue_seconds = 0.0
        self.moves = 0
        self.run: Run | None = None
        """Set while it runs."""
        self.timer: asyncio.TimerHandle | None = None
        """Of its patience."""
        self.started = self.answered = False

    def __lt__(self, other: Queued) -> bool:
        return self.order < other.order


class Connection:
    """The client's socket: frames in, frames out. What it does not take at once goes out when it can."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.socket, self.loop = connection, loop
        self.reader = wire.FrameReader()
        self.unsent = bytearray()
        self.gone = asyncio.Event()

    def serve(self, take: Callable[[Frame], None], taken: Callable[[], None]) -> None:
        """take: called with each frame; taken: after some, and when the client has taken what waited for it."""
        self.take, self.taken = take, taken
        self.loop.add_reader(self.socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
            for frame in self.reader.feed(data):
                self.take(frame)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # what is no frame is not from our client
            data = b""
        self.taken()
        if not data:
            self.close()

    def send(self, kind: Kind, number: int, body: bytes) -> None:
        data: bytes | memoryview = wire.pack(kind, number, body)
        if not self.unsent and not self.gone.is_set():
            data = memoryview(data)[self._sent(data) :]
            if data:
                self.loop.add_writer(self.socket.fileno(), self._on_writable)
        self.unsent += data

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.gone.set()
            return len(data)

    def _on_writable(self) -> None:
        del self.unsent[: self._sent(self.unsent)]
        if not self.unsent:
            self.loop.remove_writer(self.socket.fileno())
            self.taken()

    def close(self) -> None:
        self.loop.remove_reader(self.socket.fileno())
        self.loop.remove_writer(self.socket.fileno())
        self.gone.set()


class Queue:
    """Consumes frames; produces one RESPONSE or LOST for each CALL. A call waits for an idle worker of its tier, or a
    cell for those of its session before it; it is unblocked by an answer, a new worker, its cancellation, or the end of
    its patience."""

    def __init__(self, settings: DaemonSettings, info: DaemonInfo, pools: Pools, connection: Connection) -> None:
        self.settings, self.info, self.pools, self.connection = settings, info, pools, connection
        self.loop = asyncio.get_running_loop()
        self.calls: dict[int, Queued] = {}
        """All that are not answered, by their number on the connection."""
        self.waiting: dict[Pool, deque[Queued]] = {}
        self.cells: list[Queued] = []
        """Those whose turn in their session has come, a heap."""
        self.fresh: list[Queued] = []
        """Those that came since the last dispatch."""
        self.orders = itertools.count()
        self.running = self.waiting_bytes = 0
        self.sessions = Sessions(settings, self, pools.open_for_session)
        self.usage_timer: asyncio.TimerHandle | None = None
        pools.on_change = self.rearrange

    def serve(self) -> None:
        self.connection.send(Kind.HELLO, 0, wire.encode(self.info))
        self.connection.serve(self.take, self.dispatch)

    def take(self, frame: Frame) -> None:
        if frame.kind is Kind.CALL:
            self.accept(frame.number, frame.body)
        elif frame.kind is Kind.CANCEL:
            self.cancel(frame.number)
        elif frame.kind is Kind.PING:
            self.send_usage()
        elif frame.kind is Kind.CLOSE:
            with suppress(ValueError):  # no text, no name of a session
                self.sessions.close(wire.decode_text(frame.body))

    def accept(self, number: int, body: bytes) -> None:
        """Queue a call, or say why it is not run."""
        call = Call(id="", code="")
        try:
            why = check.frame(body)
            if not why:
                call = wire.decode_call(body)
                why = check.complaint(call)
        except (ValueError, RecursionError) as error:
            why = f"the call cannot be read ({error})"[:1000]
        if not why and number in self.calls:
            why = f"number {number} is that of another call on this connection"
        waiting = len(self.calls) - self.running
        if why:
            self.send(number, Response(id=call.id, outcome=ProgramOutcome.REJECTED, message=why))
        elif waiting >= self.settings.max_queue or self.waiting_bytes > MAX_WAITING_BYTES:
            full = f"{waiting} calls are waiting already; try again later"
            self.send(number, Response(id=call.id, outcome=ServiceOutcome.OVERLOADED, message=full))
        else:
            self.enqueue(Queued(number, next(self.orders), call, len(body)))

    def enqueue(self, queued: Queued) -> None:
        self.calls[queued.number] = queued
        self.fresh.append(queued)
        self.waiting_bytes += queued.size
        if queued.call.session:
            self.sessions.submit(queued)
        else:
            self.place(queued)

    def place(self, queued: Queued) -> None:
        """A plain call in its tier's queue, by its order."""
        pool = self.pools.choose(queued.call.code)
        queue = self.waiting.setdefault(pool, deque())
        queue.append(queued)
        if len(queue) > 1 and queued < queue[-2]:
            self.waiting[pool] = deque(sorted(queue))

    def dispatch(self) -> None:
        """Start what may run; what may not yet waits as long as its patience lasts."""
        while self.running < self.settings.slots and len(self.connection.unsent) < MAX_UNSENT_BYTES:
            pool = self.next_pool()
            while self.cells and self.cells[0].answered:
                self.sessions.skip(heapq.heappop(self.cells))
            if self.cells and (pool is None or self.cells[0] < self.waiting[pool][0]):
                self.sessions.start(self.begun(heapq.heappop(self.cells)))
            elif pool is not None:
                self.start(pool.idle.pop(), self.begun(self.waiting[pool].popleft()))  # used last, so its memory is warm
            else:
                break
        for queued in self.fresh:
            if not queued.started and not queued.answered:
                queued.timer = self.loop.call_later(queued.call.patience_seconds, self.expire, queued)
        self.fresh.clear()

    def next_pool(self) -> Pool | None:
        """That of the longest waiting call that can start now. Pools without an idle worker are asked for more."""
        best = None
        for pool, queue in self.waiting.items():
            while queue and queue[0].answered:
                queue.popleft()
            if not queue:
                continue
            if not pool.idle:
                pool.want(min(len(queue), self.settings.slots - self.running))
            elif best is None or queue[0] < self.waiting[best][0]:
                best = pool
        return best

    def begun(self, queued: Queued) -> Queued:
        """Its turn has come."""
        self.running += 1
        queued.started = True
        queued.queue_seconds += time.monotonic() - queued.arrived
        if queued.timer is not None:
            queued.timer.cancel()
        return queued

    def start(self, worker: Worker, queued: Queued) -> None:
        call = queued.call
        limits = call.limits
        seed = int.from_bytes(os.urandom(8)) if call.seed is None else call.seed
        program = Program(
            call.code,
            call.stdin,
            call.files,
            seed,
            limits.cpu_seconds,
            limits.memory_bytes,
            limits.output_bytes,
            limits.processes,
        )
        run = queued.run = ProgramRun(call, worker, self.settings.grace_seconds, partial(self.ran, queued))
        run.start(channel.pack(program))

    def ran(self, queued: Queued, response: Response | None) -> None:
        """None: nothing of it ran, and it is placed on another slot."""
        self.running -= 1
        queued.run = None
        queued.moves += 1
        if response is not None:
            self.finish(queued, response)
        elif queued.moves > MAX_MOVES:
            self.finish(queued, verdict.fault(queued.call.id, f"{queued.moves} slots in a row could not start it"))
        else:
            queued.started, queued.arrived = False, time.monotonic()
            self.place(queued)
        self.dispatch()

    def ready(self, cell: QueuedCell) -> None:
        assert isinstance(cell, Queued)
        heapq.heappush(self.cells, cell)

    def leave(self) -> None:
        self.running -= 1
        self.dispatch()

    def cancel(self, number: int) -> None:
        queued = self.calls.get(number)
        if queued is None:
            return
        if queued.run is not None:
            queued.run.stop("cancelled")
        else:
            self.finish(queued, Response(id=queued.call.id, outcome=ServiceOutcome.CANCELLED))

    def expire(self, queued: Queued) -> None:
        why = f"it waited for {queued.call.patience_seconds:g} seconds, and its turn did not come; try again later"
        self.finish(queued, Response(id=queued.call.id, outcome=ServiceOutcome.OVERLOADED, message=why))

    def rearrange(self) -> None:
        """A worker or a zygote came or went. What waits for a tier that cannot be had goes to the next best."""
        for pool in [pool for pool in self.waiting if pool.problem and pool.tier is not tiers.BARE]:
            for queued in self.waiting.pop(pool):
                if not queued.answered:
                    self.place(queued)
        self.dispatch()

    def finish(self, queued: QueuedCell, response: Response | None) -> None:
        """Answer it, unless it is answered; None: its session is lost."""
        assert isinstance(queued, Queued)
        if queued.answered:
            return
        queued.answered = True
        del self.calls[queued.number]
        self.waiting_bytes -= queued.size
        if queued.timer is not None:
            queued.timer.cancel()
        if response is None:
            self.connection.send(Kind.LOST, queued.number, b"")
        else:
            self.send(queued.number, response, queued.queue_seconds)

    def send(self, number: int, response: Response, queue_seconds: float = 0.0) -> None:
        ran = isinstance(response.outcome, ProgramOutcome) and response.outcome is not ProgramOutcome.REJECTED
        whole = structs.replace(
            response,
            queue_seconds=queue_seconds,
            isolation=self.info.isolation if ran else "",
            failed_probes=self.info.failed_probes if ran else (),
            node=self.info.node,
        )
        try:
            body = wire.encode(whole)
        except Exception as error:
            traceback.print_exc()
            body = wire.encode(verdict.fault(response.id, f"the answer could not be encoded ({type(error).__name__})"))
        self.connection.send(Kind.RESPONSE, number, body)
        if self.usage_timer is None:
            self.usage_timer = self.loop.call_later(USAGE_SECONDS, self.send_usage)

    def send_usage(self) -> None:
        if self.usage_timer is not None:
            self.usage_timer.cancel()
            self.usage_timer = None
        usage = Usage(
            cpu_seconds=self.cpu_seconds(),
            waiting=len(self.calls) - self.running,
            running=self.running,
            sessions=len(self.sessions.alive),
        )
        self.connection.send(Kind.USAGE, 0, wire.encode(usage))

    def cpu_seconds(self) -> float:
        """CPU of this process and of everything below it so far, seconds."""
        return time.process_time() + self.pools.cpu_seconds()
