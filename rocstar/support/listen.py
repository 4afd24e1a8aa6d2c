"""Shared by our servers: the listening address, parsing requests, answers common to OpenAI-compatible servers, and
shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from rocstar.errors import ConfigError, DataError
from rocstar.sandbox.container import open_files
from rocstar.sandbox.service.core import is_loopback as is_loopback
from rocstar.sandbox.service.core import url_of as url_of

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")
MOST_PARTS = 500_000  # of a JSON body, which take up to 2 CPU-s, in which nobody else is served
FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n\r\ntoo many connections are open"


def listener(host: str, port: int) -> socket.socket:
    """port: 0 takes a free one. Raises ConfigError where the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0") from None


class Bounded(H11Protocol):
    """A connection (httptools limits no headers). More than `most` are refused, since each is an open file."""

    def __init__(self, most: int, **rest: Any) -> None:
        super().__init__(**rest)
        self.most = most

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(FULL)
            transport.close()


def quiet_server(app: Any, **more: Any) -> Any:
    """A uvicorn.Server that logs nothing but errors, and leaves signals to others. more: of its Config."""
    http: Any = partial(Bounded, open_files() // 2)  # the rest for files, and connections on their way out
    server: Any = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", access_log=False, **more))
    server.capture_signals = nullcontext
    return server


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request. most: bytes, whole MiB. Raises DataError where it has more."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise DataError(f"the body has more than {most >> 20} MiB")
    return bytes(body)


def object_in(body: bytes) -> dict[str, Any]:
    """Raises DataError. A quote within a text has a backslash before it."""
    if body.count(b'"') - body.count(b'\\"') + body.count(b"[") + body.count(b"{") > MOST_PARTS:
        raise DataError(f"the body has more than {MOST_PARTS} strings, lists and objects")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError("the body must be a JSON object")
    return found


async def while_wanted(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Make the answer to a request that has been read. Raises ClientDisconnect where its client goes before that; the
    work is cancelled then."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def key_in(request: Request) -> str:
    """The API key that a client sends as OpenAI's do; "" without."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def refusal(status: int, message: str, kind: str) -> Response:
    """An error as OpenAI's and Anthropic's clients read it."""
    fields = {"message": message, "type": kind, "param": None, "code": kind}
    return JSONResponse({"type": "error", "error": fields}, status_code=status)


async def unknown_path(request: Request, error: Exception) -> Response:
    """Refuse a path that the application does not have."""
    paths = " and ".join(route.path for route in request.app.routes)
    return refusal(404, f"there is no {request.url.path} here; this server has {paths}", "not_found_error")


def models_of(name: str) -> Response:
    """The list of models of a server that has one."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "rocstar"}
    return JSONResponse({"object": "list", "data": [model]})


def completion_of(name: str, kind: str) -> dict[str, Any]:
    """How a chat completion of a model begins, or a chunk of one."""
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": name}


def event_of(value: Mapping[str, Any]) -> str:
    """A server-sent event, whose name is its type where it has one."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"


@contextmanager
def ended_by_signals(server: Any) -> Iterator[None]:
    """While the context lasts, Ctrl-C and SIGTERM end this uvicorn.Server in order. Must be entered by the main thread
    before the server is announced: uvicorn itself handles signals only once its loop runs, and a KeyboardInterrupt
    before that is lost if Python raises it in a destructor. Answers cut by this are not logged as errors."""
    log = logging.getLogger("uvicorn.error")

    def goes_on(record: logging.LogRecord) -> bool:
        return not server.should_exit

    log.addFilter(goes_on)
    end: Callable[..., None] = server.handle_exit
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        log.removeFilter(goes_on)
        for number, handler in before.items():
            signal.signal(number, handler)
