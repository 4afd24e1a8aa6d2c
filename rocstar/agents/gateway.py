"""The HTTP address at which the user's agents reach the trained model, over the run's engines. A key names an attempt;
requests without a key, or with that of an ended attempt, are refused.

    GET  /v1/models
    POST /v1/chat/completions, /v1/responses, /v1/messages    see wire.py
    POST /v1/tools/NAME    one of the recipe's tools: its arguments as a JSON object; its output as `content`"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from rocstar.agents.attempt import AgentAttempt, AttemptOver
from rocstar.agents.wire import MODEL, WIRES, Body
from rocstar.errors import DataError, Unavailable
from rocstar.support.listen import (
    Bounded,
    body_of,
    event_of,
    key_in,
    models_of,
    object_in,
    quiet_server,
    refusal,
    while_wanted,
)

BODY_BYTES = 32 << 20
REST_SECONDS = 86_400  # idle time of a connection, longer than attempts last: data sent while we close it would be lost
SERVING = {"lifespan": "off", "timeout_keep_alive": REST_SECONDS}
MOST_CONNECTIONS = 64  # of a sandboxed program, so that it can't exhaust the run's descriptors


class Gateway:
    """One address for all attempts under way, open while there are any."""

    def __init__(self) -> None:
        self._attempts: dict[str, AgentAttempt] = {}
        self.port = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def opened(self, attempt: AgentAttempt) -> AsyncIterator[str]:
        """The key of an attempt, valid within the context."""
        key = f"rocstar-{secrets.token_urlsafe(24)}"
        if not self._attempts:
            place = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self._server = quiet_server(app_of(self._attempts.get), **SERVING)
            self._serving = asyncio.create_task(self._server.serve(sockets=[place]))
            self.port = place.getsockname()[1]
        self._attempts[key] = attempt
        try:
            yield key
        finally:
            del self._attempts[key]
            if not self._attempts:
                self._server.should_exit = self._server.force_exit = True
                await asyncio.shield(self._serving)  # cancelling it here would leave the address listening

    async def listen(self, place: socket.socket) -> asyncio.Server:
        """Answer there too, while an attempt is under way; connections beyond MOST_CONNECTIONS are refused, since each
        is a descriptor of the run. The caller closes the returned server."""
        config, state = self._server.config, ServerState()
        answers = partial(Bounded, MOST_CONNECTIONS, config=config, server_state=state, app_state={})
        return await asyncio.get_running_loop().create_server(answers, sock=place)


def app_of(find: Callable[[str], AgentAttempt | None]) -> Starlette:
    """The gateway's application. find: the attempt under way that has a key."""

    async def answered(request: Request) -> Response:
        attempt = find(request.headers.get("x-api-key", key_in(request)))
        if attempt is None:
            return refusal(401, "no attempt under way has this key", "authentication_error")
        try:
            body = object_in(await body_of(request, BODY_BYTES))
            if name := request.path_params.get("name"):
                return JSONResponse({"content": await while_wanted(request, attempt.call(name, body))})
            return await _completed(request, attempt, body)
        except ClientDisconnect:
            return Response()  # the client has gone
        except AttemptOver as over:
            return refusal(400, str(over), "context_length_exceeded")
        except (DataError, RecursionError) as wrong:  # RecursionError: nested a thousand times
            return refusal(400, str(wrong), "invalid_request_error")
        except Unavailable as fault:
            return refusal(503, str(fault), "server_error")
        except Exception as mistake:
            if mistake is not attempt.broken:
                raise
            return refusal(500, f"the run ends: {mistake!r:.200}", "server_error")  # reports the reason, once

    paths = ("/v1/tools/{name}", *WIRES)
    posts = [Route(path, answered, methods=["POST"]) for path in paths]
    return Starlette(routes=[Route("/v1/models", models_of(MODEL), methods=["GET"]), *posts])


async def _completed(request: Request, attempt: AgentAttempt, body: Body) -> Response:
    wire = WIRES[request.scope["path"]]
    try:
        request_fields = wire.read(body)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"the request has another form than this protocol has: {error!r:.100}") from None
    found = wire.write(await while_wanted(request, attempt.complete(*request_fields)))
    if not body.get("stream"):
        return JSONResponse(found)
    events = map(event_of, wire.stream(found, body))
    return StreamingResponse(iter([*events, wire.end]), media_type="text/event-stream")
