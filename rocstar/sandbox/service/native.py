"""The native API: one call, a batch, sessions, and the frames that clients and gateways speak.

A program that was run is 200, whatever it did; `rejected` is 400, `internal` (safe to send again) 500, `overloaded` 503
with a Retry-After. A batch is always 200: its calls have outcomes of their own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs
from starlette import responses
from starlette.websockets import WebSocket, WebSocketDisconnect

from rocstar.sandbox import check, wire
from rocstar.sandbox.call import (
    CALLER,
    MAX_BRANCHES,
    Call,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
    SessionLost,
    caller_named,
    failed,
)
from rocstar.sandbox.service import core
from rocstar.sandbox.service.core import Asked, BadRequest, Endpoints, Hold, Service, decode
from rocstar.sandbox.settings import Settings
from rocstar.sandbox.wire import FrameKind

MESSAGE_BYTES = 2**20  # of a WebSocket; frames share one, and a long frame takes several
MAX_CALL_BYTES = 2 * core.MAX_BODY_BYTES  # of a call that comes as a frame
USAGE_SECONDS = 0.25  # between looks at our load

STATUS = {ProgramOutcome.REJECTED: 400, ServiceOutcome.INTERNAL: 500, ServiceOutcome.OVERLOADED: 503}


class HttpReply(responses.Response):
    """What goes back."""

    media_type = "application/json"


Seconds = Annotated[float, Meta(gt=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
GivenLimits = dict[str, int | float]
"""Any of `Limits`; others are the service's own."""


class Base64(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    base64: bytes


class CellShape(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    """One cell of a session; fields mean what those of `Call` do."""

    code: str
    id: str = ""
    files: Annotated[dict[str, str | Base64], Meta(max_length=check.MAX_FILES)] = msgspec.field(default_factory=dict)
    fetch: Annotated[tuple[str, ...], Meta(max_length=check.MAX_FILES)] = ()
    patience_seconds: Seconds | None = None


class CallShape(CellShape, forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    """One program."""

    stdin: str = ""
    seed: Seed | None = None
    limits: GivenLimits = msgspec.field(default_factory=dict)


class CallBatch(Struct, forbid_unknown_fields=True, frozen=True):
    calls: Annotated[list[CallShape], Meta(min_length=1, max_length=core.MAX_BATCH)]


class OpenSession(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A session; the limits are those of each cell."""

    limits: GivenLimits = msgspec.field(default_factory=dict)
    seed: Seed | None = None


class ForkSession(Struct, forbid_unknown_fields=True, frozen=True):
    branches: Annotated[int, Meta(ge=1, le=MAX_BRANCHES)]
    """How many sessions to make of this one."""


async def run(asked: Asked) -> HttpReply:
    service, shape = asked.service, decode(asked.body, CallShape)
    call = call_of(shape, service.settings, service.settings.patience_seconds)
    return answer(service, await service.run(call))


def answer(service: Service, response: Response) -> HttpReply:
    """The response to one program or cell, with the HTTP status that goes with its outcome."""
    return HttpReply(full(response), STATUS.get(response.outcome, 200), service.retry_headers(response.outcome))


def full(response: Response) -> bytes:
    """All its fields as JSON, also those that have their default."""
    return core.encode(structs.asdict(response))


async def batch(asked: Asked) -> HttpReply:
    size = 0

    def told(shape: CallShape, response: Response) -> bytes:
        nonlocal size
        size += len(result := full(response))
        asked.hold(size)
        return result

    def call_or_rejected(shape: CallShape) -> Call | Response:
        try:
            return call_of(shape, asked.service.settings, core.BATCH_PATIENCE_SECONDS)
        except BadRequest as error:  # one bad call does not spoil its batch
            return failed(shape.id, ProgramOutcome.REJECTED, str(error))

    results = await asked.service.run_all(decode(asked.body, CallBatch).calls, call_or_rejected, told)
    return HttpReply(b'{"results":[' + b",".join(results) + b"]}")


def call_of(shape: CallShape, settings: Settings, patience_seconds: float) -> Call:
    """Raises BadRequest."""
    return Call(
        id=shape.id,
        code=shape.code,
        stdin=shape.stdin,
        files=files_of(shape.files),
        fetch=shape.fetch,
        seed=shape.seed,
        limits=limits_of(settings, **shape.limits),
        patience_seconds=shape.patience_seconds or patience_seconds,
    )


def files_of(given: Mapping[str, str | Base64]) -> dict[str, bytes]:
    return {name: each.encode() if isinstance(each, str) else each.base64 for name, each in given.items()}


@lru_cache(maxsize=1024, typed=True)  # most calls of a caller have the same
def limits_of(settings: Settings, /, **given: int | float) -> Limits:
    """Raises BadRequest."""
    if unknown := sorted(given.keys() - Limits.__struct_fields__):
        known = " ".join(Limits.__struct_fields__)
        raise BadRequest(f"the request has a wrong field: there is no limit {unknown[0]!r:.80}, only {known}")
    # More CPU than time is of use to threads only.
    cpu = {"cpu_seconds": given["wall_seconds"]} if "wall_seconds" in given else {}
    try:
        limits = msgspec.convert({**structs.asdict(core.default_limits(settings)), **cpu, **given}, Limits)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has a wrong limit: {error}") from None
    if problem := core.over_limits(limits, settings) or check.of_limits(limits):
        raise BadRequest(problem)
    return limits


async def open_session(asked: Asked) -> HttpReply:
    service, shape = asked.service, decode(asked.body or b"{}", OpenSession)
    limits = limits_of(service.settings, **shape.limits)
    name, patience = session_name(limits), service.settings.patience_seconds
    call = Call(id="", code="", limits=limits, seed=shape.seed, session=name, cell=1, patience_seconds=patience)
    response = await service.run(call)
    if response.outcome is not ProgramOutcome.OK:
        raise BadRequest(f"the session could not be opened: {response.message or response.outcome}", 503, 5)
    return HttpReply(core.encode({"session": name}), 201)


async def run_cell(asked: Asked) -> HttpReply:
    """The response to a cell; those sent together run in their order."""
    shape = decode(asked.body, CellShape)
    files, patience = files_of(shape.files), shape.patience_seconds or asked.service.settings.patience_seconds
    cell = later_cell(asked, id=shape.id, code=shape.code, files=files, fetch=shape.fetch, patience_seconds=patience)
    return answer(asked.service, await in_session(asked, cell))


async def fork_session(asked: Asked) -> HttpReply:
    count = decode(asked.body, ForkSession).branches
    limits = limits_in(asked)
    names = tuple(session_name(limits) for _ in range(count))
    response = await in_session(asked, later_cell(asked, id="", code="", branches=names))
    if response.outcome is not ProgramOutcome.OK:
        is_refused = response.outcome is ProgramOutcome.REJECTED
        why = f"the session was not forked: {response.message or response.outcome}"
        raise BadRequest(why, 409 if is_refused else 503, None if is_refused else 5)
    return HttpReply(core.encode({"sessions": names}), 201)


async def end_session(asked: Asked) -> HttpReply:
    if not asked.service.client.close_session(asked.name):
        raise no_session(asked)
    return HttpReply(b"", 204)


def session_name(limits: Limits) -> str:
    """The id of a new session: 128 random bits, so that who knows it owns the session (nothing lists ids), and the
    limits of its cells, so that the service need not remember any."""
    return "_".join([os.urandom(16).hex(), *map(str, structs.astuple(limits))])


def limits_in(asked: Asked) -> Limits:
    """Those that the session's id names. Raises BadRequest."""
    try:
        _, *given = asked.name.split("_")
        named = dict(zip(Limits.__struct_fields__, map(msgspec.json.decode, given), strict=True))
        return limits_of(asked.service.settings, **named)
    except (ValueError, TypeError, BadRequest):  # nobody was given such an id
        raise no_session(asked) from None


def later_cell(asked: Asked, **fields: Any) -> Call:
    return Call(limits=limits_in(asked), session=asked.name, cell=2, **fields)  # its daemon counts them


async def in_session(asked: Asked, call: Call) -> Response:
    """Raises BadRequest where the session is gone, also while it ran."""
    try:
        response = await asked.service.run(call)
    except SessionLost:
        raise no_session(asked) from None
    if response.outcome is ServiceOutcome.CANCELLED:
        raise no_session(asked)
    return response


def no_session(asked: Asked) -> BadRequest:
    why = "it was closed, was lost, or was without a cell for too long; open one with POST /v1/sessions"
    return BadRequest(f"there is no session {asked.name[:40]!r}: {why}", 404)


class FrameConnection:
    """Speaks `wire` on a WebSocket. Consumes frames, one task for each call, and produces theirs; `_send` is unblocked
    by `push`. When the connection ends, its calls and sessions end."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self.service, self.client, self.socket = service, service.client, socket
        self.is_gateways = False  # its token has been the first at some time: it says whom it calls for
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.sessions: set[str] = set()
        self.unsent = bytearray()
        self.wake = asyncio.Event()
        self.close: Callable[[], object] = socket.scope["state"]["abort"]
        self.arriving, self.unread = Hold(service.budget, self.close), Hold(service.budget, self.close)

    async def converse(self) -> None:
        self._look_at_tokens()
        await self.socket.accept()
        tasks = [asyncio.create_task(work()) for work in (self._send, self._report)]
        reader = wire.FrameReader()
        self.service.connections.add(self)
        try:
            self.push(FrameKind.HELLO, 0, wire.encode(self.client.info()))
            with self.arriving, self.unread:
                while True:
                    for frame in reader.feed(await self.socket.receive_bytes()):
                        self._take(frame)
                    if reader.size > core.SMALL_BYTES or self.arriving.size:
                        await self._make_room_for(reader.size)
        except BadRequest as error:
            core.LOG.warning("rocstar: a client's connection was closed: %s", error)
            await self.socket.close(1013)
        except WebSocketDisconnect:
            pass
        except SandboxDown as error:
            await self.socket.send_bytes(wire.pack(FrameKind.REFUSED, 0, wire.encode(str(error))))
            await self.socket.close()
        except (ValueError, KeyError) as error:  # KeyError: a message of text
            core.LOG.warning("a client sent what is no frame (%s); its connection was closed", error)
            await self.socket.close(1002)
        finally:
            for task in (*tasks, *self.calls.values()):
                task.cancel()
            for name in self.sessions:
                self.client.close_session(name)
            self.service.connections.discard(self)

    def push(self, kind: FrameKind, number: int, body: bytes) -> None:
        self.unsent += wire.pack(kind, number, body)
        self.wake.set()
        self.unread.resize(self.unread.size + wire.HEADER.size + len(body), moved=False, refused=False)

    async def _make_room_for(self, arriving: int) -> None:
        """Read no more while others hold all there is. Raises BadRequest where that lasts."""
        since = time.monotonic()
        while True:
            try:
                return self.arriving.resize(arriving)
            except BadRequest:
                if time.monotonic() - since > core.STALLED_SECONDS:
                    raise
                await asyncio.sleep(0.1)

    async def _send(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            with suppress(WebSocketDisconnect):  # `converse` hears of it too
                while self.unsent:
                    await self.socket.send_bytes(message := bytes(self.unsent[:MESSAGE_BYTES]))
                    del self.unsent[: len(message)]
                    self.unread.resize(self.unread.size - len(message))

    def _take(self, frame: wire.Frame) -> None:
        """Raises ValueError for what no client of ours sends."""
        match frame.kind:
            case FrameKind.CALL if frame.number not in self.calls:
                self.calls[frame.number] = asyncio.create_task(self._answer(frame.number, frame.body))
            case FrameKind.CANCEL:
                if frame.number in self.calls:  # later, for a task that has not begun would end without an answer
                    asyncio.get_running_loop().call_soon(self.calls[frame.number].cancel)
            case FrameKind.CLOSE:
                name = wire.decode_text(frame.body)
                self.sessions.discard(name)
                self.client.close_session(name)
            case FrameKind.PING:
                self.push(FrameKind.USAGE, 0, wire.encode(self.service.usage()))
            case _:
                raise ValueError(f"{frame.kind.name} with number {frame.number}")

    def _look_at_tokens(self) -> None:
        first = self.service.tokens.first()
        self.is_gateways |= not first or CALLER.get() == caller_named(first.encode())

    async def _answer(self, number: int, body: bytes) -> None:
        """Exactly one RESPONSE or LOST, whatever happens."""
        self._look_at_tokens()
        if (caller := wire.caller_of(number)) and self.is_gateways:
            CALLER.set(caller_named(CALLER.get(), caller))
        try:
            with Hold(self.service.budget) as held:
                kind, reply = await self._outcome(body, held)
        except asyncio.CancelledError:
            cancelled = failed("", ServiceOutcome.CANCELLED, "the caller cancelled it")
            kind, reply = FrameKind.RESPONSE, wire.encode(cancelled)
        finally:
            del self.calls[number]
        self.push(kind, number, reply)

    async def _outcome(self, body: bytes, held: Hold) -> tuple[FrameKind, bytes]:
        call = Call(id="", code="")
        try:
            if len(body) > core.SMALL_BYTES:
                held.resize(len(body))
            call = wire.decode_call(body)
            if why := self._complaint(call, len(body)):
                return FrameKind.RESPONSE, wire.encode(failed(call.id, ProgramOutcome.REJECTED, why))
            if call.session:
                self.sessions |= {call.session, *call.branches}
            running = self.client.run(call, waits=False, again=False)  # who sent it sends it again, not we
            return FrameKind.RESPONSE, wire.encode(await self.service.outcome_of(call.id, running))
        except BadRequest as error:
            return FrameKind.RESPONSE, wire.encode(failed(call.id, ServiceOutcome.OVERLOADED, str(error)))
        except SessionLost as error:
            return FrameKind.LOST, wire.encode(str(error))
        except (ValueError, RecursionError) as error:
            return FrameKind.RESPONSE, wire.encode(failed("", ProgramOutcome.REJECTED, f"no call: {error}"[:1000]))

    def _complaint(self, call: Call, size: int) -> str:
        """Why a call is not run, else empty. Raises BadRequest when none is taken any more."""
        if self.service.draining:
            raise BadRequest("the service is shutting down; send it elsewhere")
        if size > MAX_CALL_BYTES:
            return f"the call has {size} bytes, and at most {MAX_CALL_BYTES} are taken; send less"
        return core.over_limits(call.limits, self.service.settings)

    async def _report(self) -> None:
        """Our load, as often as it changes."""
        told = None
        while True:
            await asyncio.sleep(USAGE_SECONDS)
            if (usage := self.service.usage()) != told:
                self.push(FrameKind.USAGE, 0, wire.encode(told := usage))


ENDPOINTS: Endpoints = {
    ("POST", "/v1/run"): run,
    ("POST", "/v1/batch"): batch,
    ("POST", "/v1/sessions"): open_session,
    ("POST", "/v1/sessions/{id}/cells"): run_cell,
    ("POST", "/v1/sessions/{id}/fork"): fork_session,
    ("DELETE", "/v1/sessions/{id}"): end_session,
}
