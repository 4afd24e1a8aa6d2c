"""The ASGI application: who may call, which path is served by what, and what the service says of itself."""

from __future__ import annotations

import asyncio
import hmac
import html
import time
from collections.abc import Iterable
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from rocstar.sandbox.call import Response, SandboxDown
from rocstar.sandbox.service import code_judge, core, native, sandbox_fusion
from rocstar.sandbox.service.core import Asked, BadRequest, Endpoint, Reply, Service, Settings, decode, encode
from rocstar.sandbox.service.mcp import McpEndpoint

OPEN_PATHS = ("/ping", "/v1/ping", "/code-judge/ping")  # a load balancer asks them and learns nothing
TOKEN_PREFIX = "/token/"
MAX_BODIES_BYTES = 256 * 2**20  # all bodies being read at once: many large ones must not fill the memory
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
REF = "#/components/schemas/{name}"
STATUSES = {
    "200": "the program was run, whatever it did; `outcome` says what",
    "400": "the request cannot be served as it is: {error: sentence}, or a Response with outcome `rejected`",
    "401": "no or a wrong token (403: a web page of another site)",
    "404": "no such path or session (405: not by this method)",
    "413": "too long (431: its headers; 408: it came too slowly)",
    "422": "the other services' paths: a field has another shape, or needs what is not served here",
    "500": "we failed; safe to send again (504 on SandboxFusion's paths)",
    "503": "overloaded: not run; Retry-After says in how many seconds to come again",
}


class Metrics:
    """What Prometheus is told."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter("rocstar_sandbox_calls", "Calls by outcome", ["outcome"], registry=registry)
        self.queue = Histogram("rocstar_sandbox_queue_seconds", "Waiting", buckets=BUCKETS, registry=registry)
        self.run = Histogram("rocstar_sandbox_run_seconds", "Running", buckets=BUCKETS, registry=registry)
        self.requests = Counter("rocstar_sandbox_requests", "HTTP requests", registry=registry)
        self.refused = Counter("rocstar_sandbox_refused", "HTTP requests refused", registry=registry)
        self.disconnects = Counter("rocstar_sandbox_disconnects", "Callers that left", registry=registry)
        self.outcomes: dict[str, int] = {}

    def watch(self, service: Service) -> None:
        for name in ("waiting", "running", "sessions", "cpu_seconds"):
            gauge = Gauge(f"rocstar_sandbox_{name}", f"{name} now", registry=self.registry)
            gauge.set_function(partial(usage_of, service, name))

    def ended(self, response: Response) -> None:
        self.outcomes[response.outcome] = self.outcomes.get(response.outcome, 0) + 1
        self.calls.labels(response.outcome).inc()
        self.queue.observe(response.queue_seconds)
        self.run.observe(response.run_seconds)


def usage_of(service: Service, name: str) -> float:
    return float(getattr(service.client.usage(), name))


class Guard:
    """The outermost layer: refuses before a body is read, and answers what was cancelled.

    `/token/SECRET/run_code` is `/run_code` with a token: for clients that can be given an address and nothing else."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.token, self.metrics = app, settings.token, metrics
        # A page in the operator's browser can reach a loopback address under a name of its own (DNS rebinding).
        self.only_plain_hosts = not settings.token and core.is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.requests.inc()
        if refusal := self.refusal(scope):
            self.metrics.refused.inc()
            await refused(refusal)(scope, receive, send)
            return
        scope["task"] = asyncio.current_task()  # the server cancels it when the caller leaves
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            if scope.get("left"):
                self.metrics.disconnects.inc()
            elif scope["type"] == "http":  # the drain took too long
                sentence = "the service is shutting down and could not finish this call; send it again"
                await refused(BadRequest(sentence, 503, 1))(scope, receive, send)

    def refusal(self, scope: Scope) -> BadRequest | None:
        """Why the request may not be served; None when it may."""
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            return BadRequest(f"a page of {origin} may not call this service", 403)
        if self.only_plain_hosts and not is_plain(host):
            return BadRequest(f"the host name {host} is not this machine's address; use 127.0.0.1 or localhost", 403)
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if scope["path"].startswith(TOKEN_PREFIX):
            given, slash, rest = scope["path"].removeprefix(TOKEN_PREFIX).partition("/")
            scope["path"] = slash + rest
        if not self.token or scope["path"] in OPEN_PATHS or hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        return BadRequest("a token is needed: send it as `Authorization: Bearer TOKEN`", 401)


@lru_cache(maxsize=1024)
def is_plain(host: str) -> bool:
    """`localhost` or an address, with or without a port. Browsers always send one; old clients may send none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is None or core.is_loopback(name) or name.replace(".", "").isdigit() or ":" in name


class Bodies:
    """Reads bodies within bounds."""

    def __init__(self) -> None:
        self.being_read = 0

    async def read(self, request: Request) -> bytes:
        """Raises BadRequest: 413 for a body over the limit, 503 when others fill the memory set aside for them. One
        that comes too slowly is ended from below (`server`)."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > core.MAX_BODY_BYTES:
            raise too_long()
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self.being_read += len(chunk)
                if len(body) > core.MAX_BODY_BYTES:
                    raise too_long()
                if self.being_read > MAX_BODIES_BYTES:
                    raise BadRequest("too many large requests arrive at once; try again in a second", 503, 1)
        except ClientDisconnect:
            raise BadRequest("the caller left while it sent the body") from None
        finally:
            self.being_read -= len(body)
        return bytes(body)


def too_long() -> BadRequest:
    return BadRequest(f"the body is longer than {core.MAX_BODY_BYTES} bytes; send it in parts", 413)


def refused(error: BadRequest) -> HttpResponse:
    """`{"error": sentence}`; 422, which only the other services' paths answer, names it `detail` as they do."""
    headers = {"connection": "close"} if error.status in (413, 503) else {}  # the rest of the body is not read
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    body = encode({"detail" if error.status == 422 else "error": str(error)})
    return HttpResponse(body, error.status, headers, media_type="application/json")


def application(settings: Settings, service: Service, metrics: Metrics) -> ASGIApp:
    bodies, sessions = Bodies(), native.Sessions(service)

    def route(endpoint: Endpoint) -> Route:
        async def serve(request: Request) -> HttpResponse:
            asked = Asked(service, await bodies.read(request), request.path_params.get("id", ""))
            if len(asked.body) > core.BIG_BODY_BYTES:
                await asyncio.sleep(0)  # others first: decoding it takes a while
            reply = await endpoint.serve(asked)
            kind = HttpResponse if isinstance(reply.body, bytes) else StreamingResponse
            return kind(reply.body, reply.status, dict(reply.headers), media_type=reply.media_type)  # type: ignore[arg-type]

        return Route(endpoint.path, serve, methods=[endpoint.method])

    async def frames(socket: WebSocket) -> None:
        await native.FrameConnection(service, socket).converse()

    async def refuse(request: Request, error: Exception) -> HttpResponse:
        metrics.refused.inc()
        return refused(error if isinstance(error, BadRequest) else meant(request, error))

    endpoints = [*native.ENDPOINTS, *code_judge.ENDPOINTS, *sandbox_fusion.ENDPOINTS, *sessions.endpoints()]
    endpoints += Nodes(settings).endpoints() if settings.accept_nodes else []
    endpoints += Pages(service, metrics, endpoints).endpoints()
    routes = [WebSocketRoute("/v1/frames", frames), Route("/mcp", McpEndpoint(service, sessions))]
    handlers = dict.fromkeys((BadRequest, SandboxDown, HTTPException, Exception), refuse)
    app = Starlette(routes=[*map(route, endpoints), *routes], exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, settings, metrics)


def meant(request: Request, error: Exception) -> BadRequest:
    """What an error of the web framework or of the client means, or a bug of ours: its traceback goes to the log."""
    path, method = request.url.path, request.method
    if isinstance(error, SandboxDown):
        return BadRequest(str(error), 503, 1)
    if not isinstance(error, HTTPException):
        return BadRequest(f"the service failed ({type(error).__name__}); its log says where", 500)
    if error.status_code == 405:
        return BadRequest(f"{path} is not called by {method}; see GET /docs", 405)
    return BadRequest(f"there is no {path} here; GET /docs lists what there is", 404)


class Joining(Struct, forbid_unknown_fields=True):
    address: str


class Nodes:
    """Nodes that joined a gateway. One that has not said so again for a while is dropped."""

    SILENT_SECONDS = 10.0

    def __init__(self, settings: Settings) -> None:
        self.token = settings.token
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("POST", "/v1/nodes", self.serve_join, "Join this gateway for a while.", Joining)]

    async def serve_join(self, asked: Asked) -> Reply:
        address, client = decode(asked.body, Joining).address, asked.service.client
        if address in self.timers:
            self.timers[address].cancel()
        else:
            try:
                client.add(address, token=self.token)
            except SandboxDown as error:
                raise BadRequest(str(error)) from None

        def drop() -> None:
            del self.timers[address]
            client.remove(address)

        self.timers[address] = asyncio.get_running_loop().call_later(self.SILENT_SECONDS, drop)
        return Reply(encode({"nodes": sorted(self.timers)}))


class Pages:
    """What the service says of itself."""

    def __init__(self, service: Service, metrics: Metrics, endpoints: Iterable[Endpoint]) -> None:
        self.service, self.metrics = service, metrics
        self.all = [*endpoints, *self.endpoints()]

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/v1/status", self.status, "Isolation, failed probes, queue, slots, calls by outcome."),
            Endpoint("GET", "/metrics", self.prometheus, "The same and more for Prometheus."),
            Endpoint("GET", "/ping", self.ping, '"pong"; needs no token.'),
            Endpoint("GET", "/v1/ping", self.ping, '"pong"; needs no token.'),
            Endpoint("GET", "/openapi.json", self.openapi, "This description."),
            Endpoint("GET", "/docs", self.docs, "The same for people."),
            Endpoint("GET", "/", self.docs, "The same for people."),
        ]

    async def status(self, asked: Asked) -> Reply:
        client, usage = self.service.client, self.service.client.usage()
        info = structs.asdict(client.info())
        rest = {
            "num_workers": info["slots"],
            "queue": usage.waiting,
            "running": usage.running,
            "sessions": usage.sessions,
            "uptime_seconds": round(time.time() - self.service.started, 3),
            "calls": self.metrics.outcomes,
            "cpu_seconds": round(usage.cpu_seconds + time.process_time(), 3),
        }
        return Reply(encode(info | rest))

    async def prometheus(self, asked: Asked) -> Reply:
        return Reply(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4")

    async def ping(self, asked: Asked) -> Reply:
        return Reply(b'"pong"')

    async def openapi(self, asked: Asked) -> Reply:
        return Reply(encode(self.described()))

    def described(self) -> dict[str, Any]:
        """OpenAPI 3.1."""
        shapes = dict.fromkeys([Response, *(endpoint.shape for endpoint in self.all if endpoint.shape is not None)])
        _, schemas = msgspec.json.schema_components(shapes, ref_template=REF)
        paths: dict[str, Any] = {}
        for endpoint in self.all:
            described: dict[str, Any] = {"summary": endpoint.says, "responses": {}}
            described["responses"] = {status: {"description": means} for status, means in STATUSES.items()}
            if endpoint.shape is not None:
                schema = {"schema": {"$ref": REF.format(name=endpoint.shape.__name__)}}
                described["requestBody"] = {"content": {"application/json": schema}}
            if "{id}" in endpoint.path:
                described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = described
        info = {"title": "rocstar sandbox", "version": version("rocstar"), "description": native.__doc__}
        return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}

    async def docs(self, asked: Asked) -> Reply:
        rows = "".join(
            f"<tr><td>{endpoint.method}<td><code>{endpoint.path}</code><td>{html.escape(endpoint.says)}"
            for endpoint in self.all
        )
        means = "".join(f"<tr><td>{status}<td>{html.escape(sentence)}" for status, sentence in STATUSES.items())
        page = f"<!doctype html><title>rocstar sandbox</title><table>{rows}</table><table>{means}</table>"
        return Reply(f'{page}<p>Fields: <a href="openapi.json">openapi.json</a>'.encode(), media_type="text/html")
