"""Sessions over HTTP: notebooks whose cells come one request at a time.

| | |
| --- | --- |
| POST /v1/sessions | `OpenSession` in (nothing will do), 201 and `SessionState` out |
| GET /v1/sessions/ID | `SessionState` |
| POST /v1/sessions/ID/cells | a `Cell` in, a `Response` out, with the statuses of /v1/run |
| POST /v1/sessions/ID/branch | 201 and the `SessionState` of another session with the same past |
| DELETE /v1/sessions/ID | 204: its cells are ended and all of it is forgotten |

404 is an id of no session that is open, 413 a history that grew too long, 503 too many sessions or no turn in time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from rocstar.sandbox.service import native
from rocstar.sandbox.service.http import Endpoint, Path, json_response, read_body, service_of, until_gone
from rocstar.sandbox.service.sessions import Held
from rocstar.sandbox.service.shapes import Cell, OpenSession, decode, encode

ROOT = "/v1/sessions"
ONE = f"{ROOT}/{{id}}"
SESSION = "session"  # where the id from the path stands in the ASGI scope
Serve = Callable[[Request, Held, bytes], Awaitable[HttpResponse]]


class SessionState(Struct, frozen=True):
    session: str
    """Its id: who knows it owns the session."""
    cells: int
    """Committed so far."""
    idle_seconds: float
    """After so long without a cell it is forgotten."""
    seed: int
    """What random numbers were seeded with before the first cell."""


def split(path: str) -> tuple[str, str]:
    """The path with `{id}` in place of a session's id, and the id; any other path as it is."""
    if not path.startswith(f"{ROOT}/"):
        return path, ""
    name, slash, rest = path.removeprefix(f"{ROOT}/").partition("/")
    return f"{ONE}{slash}{rest}", name


def where_it_lives(serve: Serve) -> Endpoint:
    """An endpoint of one session: served here, or by the worker that holds it."""

    async def endpoint(request: Request) -> HttpResponse:
        service, name = service_of(request), request.scope[SESSION]
        body = await read_body(request)
        worker = service.hop.other(name)
        if worker is None:
            return await serve(request, service.sessions.find(name), body)
        answer = await until_gone(request, service.hop.ask(worker, request.method, request.scope["path"], body))
        headers = {key: value for key, value in answer.headers.items() if key == "retry-after"}
        return json_response(answer.body, answer.status, headers)

    return endpoint


async def open_session(request: Request) -> HttpResponse:
    """POST /v1/sessions."""
    service = service_of(request)
    body = await read_body(request)
    return described(service.sessions.open(decode(body or b"{}", OpenSession)), 201)


async def run_cell(request: Request, held: Held, body: bytes) -> HttpResponse:
    """POST /v1/sessions/ID/cells."""
    service = service_of(request)
    response = await until_gone(request, service.sessions.run(held, decode(body, Cell)))
    return native.answer(service, response)


async def branch(request: Request, held: Held, body: bytes) -> HttpResponse:
    """POST /v1/sessions/ID/branch. Waits for a cell that runs."""
    return described(await until_gone(request, service_of(request).sessions.branch(held)), 201)


async def state(request: Request, held: Held, body: bytes) -> HttpResponse:
    """GET /v1/sessions/ID."""
    return described(held)


async def close(request: Request, held: Held, body: bytes) -> HttpResponse:
    """DELETE /v1/sessions/ID."""
    await service_of(request).sessions.close(held)
    return HttpResponse(status_code=204)


def described(held: Held, status: int = 200) -> HttpResponse:
    session = held.session
    told = SessionState(
        session=held.name, cells=len(session.history), idle_seconds=held.idle_seconds, seed=session.seed
    )
    return json_response(encode(told), status)


PATHS: list[Path] = [
    ("POST", ROOT, open_session),
    ("GET", ONE, where_it_lives(state)),
    ("DELETE", ONE, where_it_lives(close)),
    ("POST", f"{ONE}/cells", where_it_lives(run_cell)),
    ("POST", f"{ONE}/branch", where_it_lives(branch)),
]
