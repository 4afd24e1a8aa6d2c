"""Sessions that callers hold over HTTP, by id. Each lives in one worker, whose number its id begins with.

Not here: HTTP (`session_api`), the way to another worker's sessions (`hop`), and what a session is
(`rocstar.sandbox.session`). An id is 128 random bits: who knows it owns the session.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rocstar.sandbox import wire
from rocstar.sandbox.service.admission import Admission
from rocstar.sandbox.service.ledger import Row
from rocstar.sandbox.service.settings import Settings, share
from rocstar.sandbox.service.shapes import BadRequest, Cell, OpenSession, files_of, limits_of, seed_of
from rocstar.sandbox.session import Session
from rocstar.sandbox.wire import Limits, Request, Response

MAX_HISTORY_BYTES = 40 * 2**20  # of one session: with the cell that needs it, it travels to the sandbox in one frame
MAX_HELD_BYTES = 512 * 2**20  # histories of all sessions of a worker
CELL_BYTES = 1024  # what a cell takes beside its code and files
MAX_WAITING = 32  # cells of one session that wait for each other
LOOK_SECONDS = 0.5  # between looks for sessions that idle; so exactly their time is kept


class Opener(Protocol):
    """What sessions need of a SandboxClient."""

    def open_session(self, *, limits: Limits | None = None, seed: int | None = None) -> Session: ...


@dataclass(slots=True, eq=False)
class Held:
    """A caller's session."""

    name: str
    """Its id."""
    session: Session
    idle_seconds: float
    used: float
    """When its last cell ended, monotonic seconds."""
    size: int = 0
    """Bytes of its history."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the cell that is admitted: those behind it wait here, where they take no slot."""
    tasks: set[asyncio.Task[Response]] = field(default_factory=set)
    """One per cell that waits or runs."""
    closed: bool = False


class SessionTable:
    """Consumes cells and produces their responses. A cell waits for its session's turn, then in the queue of all calls.
    A session ends by `close`, or when it had no cell for its `idle_seconds`."""

    def __init__(self, opener: Opener, admission: Admission, settings: Settings, row: Row, number: int = 0) -> None:
        """number: the worker's."""
        self.opener = opener
        self.admission = admission
        self.settings = settings
        self.row = row
        self.number = number
        self.most = share(settings.max_sessions, settings.workers)
        self.held: dict[str, Held] = {}
        self.size = 0
        self.looking: asyncio.TimerHandle | None = None
        self.closing: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    def find(self, name: str) -> Held:
        """Raises BadRequest."""
        held = self.held.get(name)
        if held is None:
            raise gone(name)
        return held

    def open(self, asked: OpenSession) -> Held:
        """Raises BadRequest, also when there are too many."""
        longest = self.settings.session_idle_seconds
        idle = asked.idle_seconds or longest
        if idle > longest:
            raise BadRequest(
                f"idle_seconds is at most {longest:g} here, got {idle:g}; the operator's --session-idle-seconds says so"
            )
        limits = limits_of(asked.limits, self.settings)
        self.refuse_if_full()
        return self.keep(self.opener.open_session(limits=limits, seed=seed_of(asked.seed)), idle)

    async def branch(self, held: Held) -> Held:
        """Another session with the same past. Raises BadRequest."""
        self.refuse_if_full(held.size)
        twin = await held.session.branch()
        if held.closed:
            await twin.close()
            raise gone(held.name)
        return self.keep(twin, held.idle_seconds, held.size)

    async def run(self, held: Held, cell: Cell) -> Response:
        """Its response. Cancelling the awaiting task ends the cell. Raises BadRequest."""
        files = files_of(cell.files)
        size = CELL_BYTES + cell_bytes(cell.code, files, cell.fetch)
        self.refuse_long(held, size)
        if len(held.tasks) > MAX_WAITING:
            raise BadRequest(f"{MAX_WAITING} cells of this session are waiting already; come again in 1 s", 503, 1)
        task = asyncio.ensure_future(self.in_turn(held, cell, files, size))
        held.tasks.add(task)
        task.add_done_callback(held.tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if held.closed and caller is not None and not caller.cancelling():
                raise gone(held.name) from None
            raise

    async def in_turn(self, held: Held, cell: Cell, files: Mapping[str, str | bytes], size: int) -> Response:
        arrived = time.monotonic()
        patience = cell.patience_seconds or self.settings.patience_seconds
        async with held.turn:
            self.refuse_long(held, size)  # others may have come first

            async def run() -> Response:
                ran = await held.session.run(cell.code, commit=cell.commit, files=files, fetch=cell.fetch)
                return replace(ran, id=cell.id)

            ticket = self.admission.submit(Request(id=cell.id, code=""), patience, arrived, run)
            try:
                response = await self.admission.outcome_for(ticket)
            finally:
                held.used = time.monotonic()
            self.count(held, response, size)
        return response

    def count(self, held: Held, response: Response, size: int) -> None:
        self.row.add("cells")
        self.row.add("cells_replayed", response.replayed_cells)
        if response.committed and not held.closed:
            held.size += size
            self.grow(size)

    async def close(self, held: Held) -> None:
        """End its cells, its processes and its files, and forget it."""
        if held.closed:
            return
        held.closed = True
        del self.held[held.name]
        self.row["sessions"] = len(self.held)
        self.grow(-held.size)
        tasks = list(held.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await held.session.close()

    def keep(self, session: Session, idle_seconds: float, size: int = 0) -> Held:
        name = f"{self.number}-{secrets.token_hex(16)}"
        held = self.held[name] = Held(name, session, idle_seconds, time.monotonic(), size)
        self.grow(size)
        self.row["sessions"] = len(self.held)
        self.row.add("sessions_opened")
        self.look_later()
        return held

    def grow(self, size: int) -> None:
        self.size += size
        self.row["session_bytes"] = self.size

    # Bounds

    def refuse_if_full(self, size: int = 0) -> None:
        if len(self.held) >= self.most:
            full = f"{len(self.held)} sessions are open, which is all this worker holds"
            raise BadRequest(f"{full}; close one, or come again in {self.next_end()} s", 503, self.next_end())
        self.refuse_heavy(size)

    def refuse_heavy(self, size: int) -> None:
        if self.size + size > MAX_HELD_BYTES:
            heavy = f"the open sessions remember {self.size} bytes of cells and files, and {MAX_HELD_BYTES} are kept"
            raise BadRequest(f"{heavy}; close one, or come again in {self.next_end()} s", 503, self.next_end())

    def refuse_long(self, held: Held, size: int) -> None:
        if held.closed:
            raise gone(held.name)
        if held.size + size > MAX_HISTORY_BYTES:
            told = f"with this cell the session remembers {held.size + size} bytes of cells and files"
            raise BadRequest(f"{told}, and at most {MAX_HISTORY_BYTES} are kept; open another session", 413)
        self.refuse_heavy(size)

    # Idle sessions

    def next_end(self) -> int:
        """Whole seconds, at least one, until the first of them may be forgotten."""
        now = time.monotonic()
        return max(1, round(min((held.used + held.idle_seconds - now for held in self.held.values()), default=1.0)))

    def look_later(self) -> None:
        if self.looking is None and self.held:
            self.looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def look(self) -> None:
        self.looking = None
        now = time.monotonic()
        for held in [each for each in self.held.values() if not each.tasks and each.used + each.idle_seconds < now]:
            closing = asyncio.ensure_future(self.close(held))
            self.closing.add(closing)
            closing.add_done_callback(self.closing.discard)
        self.look_later()


def cell_bytes(code: str, files: Mapping[str, str | bytes], fetch: Sequence[str]) -> int:
    """What a cell takes on its way to the sandbox, in its own frame and in its history's."""
    packed = {path: wire.packed_file(content) for path, content in files.items()}
    return len(wire.encode_frame({"code": code, "files": packed, "fetch": fetch}))


def gone(name: str) -> BadRequest:
    shown = name[:40]
    return BadRequest(
        f"there is no session {shown!r}: it was closed, was without a cell for too long, or its worker was restarted; "
        "open one with POST /v1/sessions",
        404,
    )
