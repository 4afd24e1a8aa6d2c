"""The sandbox host: a process apart from the trainer that owns the slots and a first-in, first-out queue of calls.

Not here: how it starts and ends (`host_life`), anything that touches a program (`slot`, `program`), or the decision
what its end means (`verdict`).

Started by `client` through `host_main`, with its settings as JSON; speaks `wire` frames on descriptor `config["fd"]`;
ends when that closes or the process that started it dies, and takes everything with it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rocstar.sandbox import slotwire, wire
from rocstar.sandbox.crew import Crew
from rocstar.sandbox.lane import Lane
from rocstar.sandbox.roster import Roster
from rocstar.sandbox.session_desk import Desk, SessionTerms
from rocstar.sandbox.tiers import BARE
from rocstar.sandbox.wire import HostInfo, ProgramOutcome, Response, ServiceOutcome

MAX_ATTEMPTS = 2  # a call lost with its slot is tried once more; lost twice, it is probably what kills slots
MAX_CODE_BYTES = 16 * 2**20
MAX_FETCH_CHARACTERS = 100_000  # of paths; their contents have a limit of their own
KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("code", "stdin"), (str,)),
    **dict.fromkeys(("seed", "memory_bytes", "output_bytes", "processes"), (int,)),
    **dict.fromkeys(("wall_seconds", "cpu_seconds"), (int, float)),
    "files": (dict,),
    "fetch": (list,),
}
"""Of a request's fields: what is of another kind would end the host, or the slot, for somebody else."""
MAX_QUEUE = 100_000  # beyond it a caller is told so at once


@dataclass(slots=True)
class Job:
    """A call in the host."""

    message: Mapping[str, Any]
    payload: bytes
    arrived: float
    number: int
    """Order of arrival."""
    attempt: int = 1
    queue_seconds: float = 0.0
    lane: Lane | None = None
    cancelled: bool = False


class Host(asyncio.Protocol):
    """Consumes frames from the client, produces one response frame per call. A call waits in the queue of its tier's
    crew until that has an idle lane; it is unblocked by an answer, a new slot, or its cancellation. Of the calls that
    could start, the one that came first does; at most `slots` run at once, whatever their tiers."""

    def __init__(self, roster: Roster, info: HostInfo, sessions: SessionTerms) -> None:
        self.roster = roster
        self.info = info
        self.reader = wire.FrameReader()
        self.queues: dict[Crew, deque[Job]] = {}
        self.jobs: dict[str, Job] = {}
        self.running = 0
        self.numbers = itertools.count()
        self.cells: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.desk = Desk(roster, sessions, self.admit, self.leave, self.send_result, self.send)
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self.roster.on_change = self.rearrange
        self.send(wire.info_message(self.info) | {"total_cpu_seconds": self.cpu_seconds()})

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()

    def data_received(self, data: bytes) -> None:
        for message in self.reader.feed(data):
            kind = message["kind"]
            if kind == "cancel":
                self.cancel(message["id"])
                self.desk.cancel(message["id"])
            elif kind == "branch":
                self.desk.branch(message["session"], message["new"])
            elif kind == "close":
                self.desk.close(message["session"])
            elif kind == "ping":
                self.send({"kind": "pong"})
            else:
                self.accept(message)
        self.dispatch()

    def accept(self, message: Mapping[str, Any]) -> None:
        problem = complaint(message)
        if problem:
            self.send_response(Response(id=message["id"], outcome=ProgramOutcome.REJECTED, message=problem))
        elif len(self.jobs) - self.running >= MAX_QUEUE:
            full = f"{MAX_QUEUE} calls are waiting already"
            self.send_response(Response(id=message["id"], outcome=ServiceOutcome.OVERLOADED, message=full))
        elif message["kind"] == "cell":
            self.desk.submit(message)
        else:
            job = Job(message, slotwire.pack_task(message), time.monotonic(), next(self.numbers))
            self.jobs[message["id"]] = job
            self.queue_of(self.roster.choose(message["code"])).append(job)

    def queue_of(self, crew: Crew) -> deque[Job]:
        return self.queues.setdefault(crew, deque())

    def cancel(self, request_id: str) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            return
        job.cancelled = True
        if job.lane is not None:
            job.lane.cancel()
        else:  # it leaves its queue when it is next looked at
            self.finish(job, Response(id=request_id, outcome=ServiceOutcome.CANCELLED))

    def dispatch(self) -> None:
        while self.running < self.info.slots:
            crew = self.next_crew()
            while self.cells and self.cells[0][1].done():
                self.cells.popleft()  # cancelled
            if self.cells and (crew is None or self.cells[0][0] < self.queues[crew][0].number):
                self.running += 1
                self.cells.popleft()[1].set_result(None)
            elif crew is not None:
                self.start(crew)
            else:
                return

    def start(self, crew: Crew) -> None:
        lane = crew.ready.pop()  # the one used last, whose memory is warm
        job = self.queues[crew].popleft()
        job.queue_seconds += time.monotonic() - job.arrived
        job.lane = lane
        self.running += 1
        lane.run(job.message, job.payload, partial(self.answered, job))

    async def admit(self) -> None:
        """Until a session's cell may run."""
        allowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cells.append((next(self.numbers), allowed))
        self.dispatch()
        await allowed

    def leave(self) -> None:
        self.running -= 1
        self.dispatch()

    def next_crew(self) -> Crew | None:
        """That of the longest waiting call that can start now. Crews without an idle lane are asked for more."""
        first = None
        for crew, queue in self.queues.items():
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                continue
            if not crew.ready:
                crew.want(min(len(queue), self.info.slots - self.running))
            elif first is None or queue[0].number < self.queues[first][0].number:
                first = crew
        return first

    def rearrange(self) -> None:
        """A slot or a nursery came or went. What waits for a tier that cannot be had goes to the next best."""
        for crew in [crew for crew in self.queues if crew.problem and crew.tier is not BARE]:
            stranded = self.queues.pop(crew)
            queue = self.queue_of(self.roster.usable(crew.tier))
            merged = sorted([*queue, *stranded], key=lambda job: job.number)
            queue.clear()
            queue.extend(merged)
        self.dispatch()

    def answered(self, job: Job, response: Response | None) -> None:
        """`None`: the slot died under the call, which says nothing about the program."""
        job.lane = None
        self.running -= 1
        if response is not None:
            self.finish(job, response)
        elif job.cancelled:
            self.finish(job, Response(id=job.message["id"], outcome=ServiceOutcome.CANCELLED))
        elif job.attempt < MAX_ATTEMPTS:
            job.attempt += 1
            job.arrived = time.monotonic()
            self.queue_of(self.roster.choose(job.message["code"])).appendleft(job)
        else:
            lost = f"its slot died {job.attempt} times"
            self.finish(job, Response(id=job.message["id"], outcome=ServiceOutcome.INTERNAL, message=lost))
        self.dispatch()

    def finish(self, job: Job, response: Response) -> None:
        del self.jobs[response.id]
        self.send_result(replace(response, queue_seconds=job.queue_seconds, attempt=job.attempt))

    def send_result(self, response: Response) -> None:
        ran = isinstance(response.outcome, ProgramOutcome)
        level = self.info.isolation if ran else ""
        failed = self.info.failed_probes if ran else ()
        self.send_response(replace(response, isolation=level, failed_probes=failed, node=self.info.node))

    def send_response(self, response: Response) -> None:
        self.send(wire.response_message(response) | {"total_cpu_seconds": self.cpu_seconds()})

    def send(self, message: Mapping[str, Any]) -> None:
        self.transport.write(wire.encode_frame(message))

    def cpu_seconds(self) -> float:
        """CPU of this process and of everything below it so far, seconds."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (
            time.process_time()
            + children.ru_utime
            + children.ru_stime
            + self.roster.cpu_seconds()
            + self.desk.cpu_seconds()
        )


def complaint(message: Mapping[str, Any]) -> str:
    """Why a request cannot be run at all; empty when it can."""
    for name, kinds in KINDS.items():
        if not isinstance(message[name], kinds):
            return f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, got {message[name]!r:.80}"
    if len(message["code"]) > MAX_CODE_BYTES:
        return f"the program is {len(message['code'])} characters long; at most {MAX_CODE_BYTES} are accepted"
    for path, content in message["files"].items():
        if not is_file(content):
            return f"the file {path!r} must be text, or bytes in base64"
        if os.path.isabs(path) or ".." in path.split("/") or not os.path.basename(path) or "\0" in path:
            return f"{path!r} is not a relative path below the working directory"
    if not all(isinstance(path, str) for path in message["fetch"]):
        return "the paths in fetch must be text"
    if sum(map(len, message["fetch"])) + len(message["fetch"]) > MAX_FETCH_CHARACTERS:
        return f"the paths in fetch have more than {MAX_FETCH_CHARACTERS} characters together"
    for name in ("wall_seconds", "cpu_seconds", "memory_bytes", "output_bytes", "processes"):
        if not 0 < message[name] < 2**40:
            return f"limit {name} must be above 0 and below 2**40, got {message[name]}"
    if message["output_bytes"] > wire.MAX_OUTPUT_BYTES:
        return f"limit output_bytes is at most {wire.MAX_OUTPUT_BYTES}, got {message['output_bytes']}"
    return ""


def is_file(content: object) -> bool:
    """Whether `wire.unpacked_file` can read it."""
    try:
        return isinstance(wire.unpacked_file(content), str | bytes)
    except (KeyError, TypeError, ValueError):
        return False
