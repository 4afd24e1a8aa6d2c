"""What all endpoints share: reading a body within bounds, answering in JSON, noticing that the caller has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse

from rocstar.sandbox.service.admission import Admission, Ticket
from rocstar.sandbox.service.hop import Hop
from rocstar.sandbox.service.ledger import Ledger, Row
from rocstar.sandbox.service.sessions import SessionTable
from rocstar.sandbox.service.settings import Settings
from rocstar.sandbox.service.shapes import BadRequest, encode
from rocstar.sandbox.wire import HostInfo, Response

MAX_BODIES_BYTES = 256 * 2**20  # all bodies being read at once, per worker: many large ones must not fill the memory


@dataclass(slots=True, kw_only=True)
class Service:
    """What every endpoint of a worker works with."""

    settings: Settings
    admission: Admission
    info: Callable[[], HostInfo]
    ledger: Ledger
    row: Row
    started: float
    """When the service started, seconds since the epoch."""
    sessions: SessionTable
    """Those that live in this worker."""
    hop: Hop
    """The way to the other workers."""
    bodies_bytes: int = field(default=0)
    """Bytes of bodies in the hands of `read_body` now."""


T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[HttpResponse]]
Path = tuple[str, str, Endpoint]
"""Method, path, and what serves it."""


def service_of(request: Request) -> Service:
    service: Service = request.scope["service"]
    return service


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> HttpResponse:
    return HttpResponse(body, status, headers, media_type="application/json")


def told(error: BadRequest) -> HttpResponse:
    """`{"error": sentence}`; 422, which only the other services' paths answer, names it `detail` as they do."""
    headers = {"connection": "close"} if error.status in (413, 503) else {}  # the rest of the body is not read
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    name = "detail" if error.status == 422 else "error"
    return json_response(encode({name: str(error)}), error.status, headers)


async def read_body(request: Request) -> bytes:
    """Raises BadRequest: 413 for a body over the limit, 503 when the bodies that others are sending fill the memory set
    aside for them. One that comes too slowly is ended from below (`protocol`)."""
    service = service_of(request)
    settings = service.settings
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise too_long(settings)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            service.bodies_bytes += len(chunk)
            if len(body) > settings.max_body_bytes:
                raise too_long(settings)
            if service.bodies_bytes > MAX_BODIES_BYTES:
                raise BadRequest("too many large requests arrive at once; try again in a second", 503)
    except ClientDisconnect:
        raise BadRequest("the caller went away while it sent the body") from None
    finally:
        service.bodies_bytes -= len(body)
    return bytes(body)


def too_long(settings: Settings) -> BadRequest:
    return BadRequest(f"the body is longer than {settings.max_body_bytes} bytes; send it in parts", 413)


@asynccontextmanager
async def while_connected(request: Request, on_gone: Callable[[], None]) -> AsyncIterator[None]:
    """`on_gone` is called as soon as the caller disconnects, or when this handler is cancelled."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        service_of(request).row.add("disconnects")
        on_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        on_gone()
        raise
    finally:
        watcher.cancel()


async def outcome_for(request: Request, ticket: Ticket) -> Response:
    """The response to a call of `request`, which is cancelled when its caller disconnects."""
    admission = service_of(request).admission
    async with while_connected(request, lambda: admission.cancel(ticket)):
        return await ticket.future


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises CancelledError, in `work` as here, when the caller disconnects."""
    task = asyncio.ensure_future(work)

    def end() -> None:
        task.cancel()

    async with while_connected(request, end):
        return await task
