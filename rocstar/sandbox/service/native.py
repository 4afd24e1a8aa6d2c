"""The native API: one call, and the frames of clients and gateways.

Status is 200 for every program that was run; `rejected` is 400, `internal` (safe to send again) and `overloaded` are
503 with a Retry-After.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs
from starlette import responses
from starlette.websockets import WebSocket, WebSocketDisconnect

from rocstar.sandbox import check, wire
from rocstar.sandbox.call import (
    CALLER,
    Call,
    Limits,
    ProgramOutcome,
    SandboxDown,
    ServiceOutcome,
    SessionLost,
    caller_named,
    failed,
)
from rocstar.sandbox.service import core
from rocstar.sandbox.service.core import BadRequest, Endpoints, Hold, HttpRequest, Service, decode
from rocstar.sandbox.settings import Settings
from rocstar.sandbox.wire import FrameKind

MESSAGE_BYTES = 2**20  # of a WebSocket message, which may contain several frames or part of a long one
MAX_CALL_BYTES = 2 * core.MAX_BODY_BYTES  # of a call in a frame
USAGE_SECONDS = 0.25  # between two readings of the service's load

STATUS = {ProgramOutcome.REJECTED: 400, ServiceOutcome.INTERNAL: 503, ServiceOutcome.OVERLOADED: 503}


class HttpReply(responses.Response):
    """The answer to an HTTP request."""

    media_type = "application/json"


Seconds = Annotated[float, Meta(gt=0)]


class Base64(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    base64: bytes


class CallShape(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    """One program; fields as in `Call`."""

    code: str
    id: str = ""
    stdin: str = ""
    files: Annotated[dict[str, str | Base64], Meta(max_length=check.MAX_FILES)] = msgspec.field(default_factory=dict)
    fetch: Annotated[tuple[str, ...], Meta(max_length=check.MAX_FILES)] = ()
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    limits: dict[str, Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float] = msgspec.field(default_factory=dict)
    """Any fields of `Limits`; missing ones are the service's defaults."""
    patience_seconds: Seconds | None = None


async def run(request: HttpRequest) -> HttpReply:
    service, shape = request.service, decode(request.body, CallShape)
    response = await service.run(call_of(shape, service.settings))
    body = core.encode(structs.asdict(response))  # all fields, defaults included
    return HttpReply(body, STATUS.get(response.outcome, 200), service.retry_headers(response.outcome))


def call_of(shape: CallShape, settings: Settings) -> Call:
    """Raises BadRequest."""
    return Call(
        id=shape.id,
        code=shape.code,
        stdin=shape.stdin,
        files={name: each.encode() if isinstance(each, str) else each.base64 for name, each in shape.files.items()},
        fetch=shape.fetch,
        seed=shape.seed,
        limits=limits_of(settings, **shape.limits),
        patience_seconds=shape.patience_seconds or settings.patience_seconds,
    )


@lru_cache(maxsize=1024, typed=True)  # most calls of a caller have the same limits
def limits_of(settings: Settings, /, **given: int | float) -> Limits:
    """Raises BadRequest."""
    if unknown := sorted(given.keys() - Limits.__struct_fields__):
        known = " ".join(Limits.__struct_fields__)
        raise BadRequest(f"the request has a wrong field: there is no limit {unknown[0]!r:.80}, only {known}")
    # Only programs with threads can use more CPU than wall time.
    cpu = {"cpu_seconds": given["wall_seconds"]} if "wall_seconds" in given else {}
    try:
        limits = msgspec.convert({**structs.asdict(core.default_limits(settings)), **cpu, **given}, Limits)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the request has a wrong limit: {error}") from None
    if problem := core.over_limits(limits, settings) or check.of_limits(limits):
        raise BadRequest(problem)
    return limits


class FrameConnection:
    """Exchanges `wire` frames on a WebSocket. Consumes frames, with one task for each call, and produces the answers;
    `_send` is unblocked by `push`. When the connection ends, its calls and sessions end."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self.service, self.client, self.socket = service, service.client, socket
        self.is_gateways = False  # its token was the first of the list at some time: its frames name their callers
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.sessions: set[str] = set()
        self.unsent = bytearray()
        self.wake = asyncio.Event()
        self.close: Callable[[], object] = socket.scope["state"]["abort"]
        self.arriving, self.unread = Hold(service.budget, self.close), Hold(service.budget, self.close)

    async def converse(self) -> None:
        self._check_for_gateway()
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
            core.LOG.warning("a client sent an invalid frame (%s); its connection was closed", error)
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
        """Stop reading while other callers fill the budget. Raises BadRequest if that lasts STALLED_SECONDS."""
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
            with suppress(WebSocketDisconnect):  # `converse` handles it
                while self.unsent:
                    await self.socket.send_bytes(message := bytes(self.unsent[:MESSAGE_BYTES]))
                    del self.unsent[: len(message)]
                    self.unread.resize(self.unread.size - len(message))

    def _take(self, frame: wire.Frame) -> None:
        """Raises ValueError for a frame that clients never send."""
        match frame.kind:
            case FrameKind.CALL if frame.number not in self.calls:
                self.calls[frame.number] = asyncio.create_task(self._answer(frame.number, frame.body))
            case FrameKind.CANCEL:
                if frame.number in self.calls:  # later, because a task cancelled before its start gives no answer
                    asyncio.get_running_loop().call_soon(self.calls[frame.number].cancel)
            case FrameKind.CLOSE:
                name = wire.decode_text(frame.body)
                self.sessions.discard(name)
                self.client.close_session(name)
            case FrameKind.PING:
                self.push(FrameKind.USAGE, 0, wire.encode(self.service.usage()))
            case _:
                raise ValueError(f"{frame.kind.name} with number {frame.number}")

    def _check_for_gateway(self) -> None:
        first = self.service.tokens.first()
        self.is_gateways |= not first or CALLER.get() == caller_named(first.encode())

    async def _answer(self, number: int, body: bytes) -> None:
        """Send exactly one RESPONSE or LOST in every case."""
        self._check_for_gateway()
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
            if self.service.draining:
                raise BadRequest("the service is shutting down; send it elsewhere")
            refusal = core.over_limits(call.limits, self.service.settings)
            if len(body) > MAX_CALL_BYTES:
                refusal = f"the call has {len(body)} bytes, and at most {MAX_CALL_BYTES} are accepted; send less"
            if refusal:
                return FrameKind.RESPONSE, wire.encode(failed(call.id, ProgramOutcome.REJECTED, refusal))
            if call.session:
                self.sessions |= {call.session, *call.branches}
            running = self.client.run(call, waits=False, again=False)  # the sender retries, not the service
            return FrameKind.RESPONSE, wire.encode(await self.service.outcome_of(call.id, running))
        except BadRequest as error:
            return FrameKind.RESPONSE, wire.encode(failed(call.id, ServiceOutcome.OVERLOADED, str(error)))
        except SessionLost as error:
            return FrameKind.LOST, wire.encode(str(error))
        except (ValueError, RecursionError) as error:
            return FrameKind.RESPONSE, wire.encode(failed("", ProgramOutcome.REJECTED, f"no call: {error}"[:1000]))

    async def _report(self) -> None:
        """Send the service's load whenever it has changed."""
        reported = None
        while True:
            await asyncio.sleep(USAGE_SECONDS)
            if (usage := self.service.usage()) != reported:
                self.push(FrameKind.USAGE, 0, wire.encode(reported := usage))


ENDPOINTS: Endpoints = {("POST", "/v1/run"): run}
