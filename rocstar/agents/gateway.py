"""The address at which agents of the user's own find the model that is trained, over the run's engines. A key names an
attempt; whoever has none, or one of an attempt that has ended, is refused.

    GET  /v1/models
    POST /v1/chat/completions, /v1/responses, /v1/messages    see wire.py
    POST /v1/tools/NAME    one of the recipe's tools: its arguments as a JSON object; what it says as `content`"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rocstar.agents.attempt import AgentAttempt, AttemptOver
from rocstar.agents.wire import CHAT, MODEL, WIRES, Body, Event, Wire
from rocstar.errors import DataError, Unavailable
from rocstar.support.listen import body_of

BODY_BYTES = 32 << 20
Answers = Callable[[AgentAttempt, Body], Awaitable[Response]]
"""An attempt and the body of its request -> the response."""


class Gateway:
    """One address for all attempts under way. It is there while any of them is."""

    def __init__(self) -> None:
        self._attempts: dict[str, AgentAttempt] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.origin = ""
        """Its address without a path."""

    @asynccontextmanager
    async def opened(self, attempt: AgentAttempt) -> AsyncIterator[str]:
        """The key of an attempt, valid within the context."""
        key = f"rocstar-{secrets.token_urlsafe(24)}"
        async with self._changing:
            if not self._attempts:
                await self._start()
            self._attempts[key] = attempt
        try:
            yield key
        finally:
            async with self._changing:
                del self._attempts[key]
                if not self._attempts:
                    await self._end()

    async def _start(self) -> None:
        place = socket.create_server(("127.0.0.1", 0), backlog=1024)
        config = uvicorn.Config(app_of(self._attempts.get), log_level="error", access_log=False, lifespan="off")
        self._server = server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]
        self._serving = asyncio.create_task(server.serve(sockets=[place]))
        self.origin = f"http://127.0.0.1:{place.getsockname()[1]}"

    async def _end(self) -> None:
        assert self._server and self._serving
        self._server.should_exit = self._server.force_exit = True
        await self._serving


def app_of(find: Callable[[str], AgentAttempt | None]) -> Starlette:
    """The gateway's application. find: the attempt under way that has a key."""

    async def answered(answer: Answers, request: Request) -> Response:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        attempt = find(request.headers.get("x-api-key", sent))
        if attempt is None:
            return _error(401, "no attempt under way has this key", "authentication_error")
        try:
            return await answer(attempt, await _body(request))
        except AttemptOver as over:
            return _error(400, str(over), "context_length_exceeded")
        except DataError as wrong:
            return _error(400, str(wrong), "invalid_request_error")
        except Unavailable as fault:
            return _error(503, str(fault), "server_error")

    async def tool(request: Request) -> Response:
        async def answer(attempt: AgentAttempt, body: Body) -> Response:
            return JSONResponse({"content": await attempt.call(request.path_params["name"], body)})

        return await answered(answer, request)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rocstar"}]})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/tools/{name}", tool, methods=["POST"]),
            *(
                Route(path, partial(answered, partial(_complete, wire)), methods=["POST"])
                for path, wire in WIRES.items()
            ),
        ]
    )


async def _complete(wire: Wire, attempt: AgentAttempt, body: Body) -> Response:
    try:
        asked = wire.read(body)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"the request has another form than this protocol has: {error!r:.100}") from None
    found = wire.write(await attempt.complete(asked))
    if not body.get("stream"):
        return JSONResponse(found)
    lines = _lines(wire.stream(found, body), ended=wire is CHAT)
    return StreamingResponse(iter(lines), media_type="text/event-stream")


def _lines(events: Iterable[Event], *, ended: bool) -> list[str]:
    """Server-sent events. ended: whether the protocol has a last one that says so."""
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n" for name, value in events]
    return [*lines, "data: [DONE]\n\n"] if ended else lines


async def _body(request: Request) -> Body:
    """Raises DataError."""
    body = await body_of(request, BODY_BYTES)
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError("the body must be a JSON object")
    return found


def _error(status: int, message: str, kind: str) -> Response:
    told = {"message": message, "type": kind, "param": None, "code": kind}
    return JSONResponse({"type": "error", "error": told}, status_code=status)
