"""The ASGI application: who may call, which path is served by what, and what the service says of itself."""

from __future__ import annotations

import asyncio
import html
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from rocstar.sandbox.call import CALLER, EVENTS, Response, SandboxDown
from rocstar.sandbox.service import code_judge, core, native, sandbox_fusion
from rocstar.sandbox.service.core import Asked, BadRequest, Endpoint, Hold, Service, Settings, decode, encode
from rocstar.sandbox.service.mcp import McpEndpoint
from rocstar.sandbox.service.native import HttpReply

OPEN_PATHS = ("/ping", "/v1/ping", "/code-judge/ping")  # a load balancer asks them and learns nothing
TOKEN_PREFIX = "/token/"
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


class Histogram:
    """Of seconds."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def family(self, name: str, says: str) -> HistogramMetricFamily:
        bounds = [*map(str, BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, says, buckets, self.sum)


class Metrics(Collector):
    """What Prometheus is told. Plain numbers: the instruments of its package cost a tenth of a call."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.events = Counter(dict.fromkeys(EVENTS, 0))
        self.queue, self.run = Histogram(), Histogram()
        self.requests = self.refused = self.disconnects = 0

    def ended(self, response: Response) -> None:
        self.outcomes[response.outcome] += 1
        self.queue.observe(response.queue_seconds)
        self.run.observe(response.run_seconds)

    def event(self, kind: str, sentence: str) -> None:
        """Of a daemon or a node, see `SandboxClient.on_event`."""
        self.events[kind] += 1
        core.LOG.warning("rocstar: %s", sentence)

    def watch(self, service: Service) -> None:
        self.usage, self.nodes, self.budget = service.usage, service.client.nodes, service.budget
        service.client.on_event = self.event
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for name, label, says, counts in (
            ("calls", "outcome", "Calls by outcome", self.outcomes),
            ("responses", "status", "HTTP responses by status", self.statuses),
            ("node_events", "event", "What became of daemons and nodes", self.events),
        ):
            family = CounterMetricFamily(f"rocstar_sandbox_{name}", says, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield self.queue.family("rocstar_sandbox_queue_seconds", "Waiting")
        yield self.run.family("rocstar_sandbox_run_seconds", "Running")
        yield CounterMetricFamily("rocstar_sandbox_requests", "HTTP requests", self.requests)
        yield CounterMetricFamily("rocstar_sandbox_refused", "HTTP requests refused", self.refused)
        yield CounterMetricFamily("rocstar_sandbox_disconnects", "Callers that left", self.disconnects)
        usage, up = structs.asdict(self.usage()), [node.slots for node in self.nodes if node.up]
        spent = usage.pop("cpu_seconds") + time.process_time()
        yield CounterMetricFamily("rocstar_sandbox_cpu_seconds", "CPU of service, daemons and programs", spent)
        usage |= {"nodes": len(self.nodes), "nodes_up": len(up), "slots": sum(up), "held_bytes": self.budget.size}
        for name, value in usage.items():
            yield GaugeMetricFamily(f"rocstar_sandbox_{name}", f"{name} now", value)
        yield InfoMetricFamily("rocstar_sandbox_build", "What runs", {"version": version("rocstar")})


class Application:
    """Refuses before a body is read, serves, and answers whatever fails.

    `/token/SECRET/run_code` is `/run_code` with a token: for clients that can be given an address and nothing else."""

    def __init__(self, settings: Settings, service: Service, metrics: Metrics) -> None:
        sessions = native.HeldSessions(service)
        self.service, self.metrics = service, metrics
        # A page in the operator's browser can reach a loopback address under a name of its own (DNS rebinding).
        self.only_plain_hosts = not settings.token and core.is_loopback(settings.host)
        self.mcp = McpEndpoint(service, sessions)
        endpoints = [*native.ENDPOINTS, *code_judge.ENDPOINTS, *sandbox_fusion.ENDPOINTS, *sessions.endpoints()]
        endpoints += Nodes(service).endpoints() if settings.accept_nodes else []
        endpoints += Pages(service, metrics, endpoints).endpoints()
        self.endpoints = {(endpoint.method, endpoint.path): endpoint for endpoint in endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.requests += 1
        scope["task"] = asyncio.current_task()  # the server cancels it when the caller leaves
        try:
            await self.serve(scope, receive, send)
        except asyncio.CancelledError:
            if scope.get("left"):
                self.metrics.disconnects += 1
            elif scope["type"] == "http":  # the drain took too long
                sentence = "the service is shutting down and could not finish this call; send it again"
                await self.reply(refused(BadRequest(sentence, 503, 1)), scope, receive, send)
        except Exception as error:
            self.metrics.refused += 1
            await self.reply(refused(error), scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises BadRequest."""
        headers = dict(scope["headers"])
        self.check_caller(scope, headers)
        kind, path = scope["type"], scope["path"]
        if (kind, path) == ("websocket", "/v1/frames"):
            await native.FrameConnection(self.service, WebSocket(scope, receive, send)).converse()
            return
        is_mcp = (kind, path) == ("http", "/mcp")
        endpoint, name = (None, "") if is_mcp else self.find(scope.get("method", kind), path)
        with Hold(self.service.budget, scope["too_slow"]) as held:
            is_open = path in OPEN_PATHS  # nobody has said who they are, so nothing is held for them
            body = b"" if is_open else await read(receive, held)
            if endpoint is None:
                await self.mcp(scope, again(body, receive), partial(self.counted, send))
                return
            if len(body) > core.BIG_BODY_BYTES:
                await asyncio.sleep(0)  # others first: decoding it takes a while
            reply = await endpoint.serve(Asked(self.service, body, name, held))
        await self.reply(reply, scope, receive, send)

    async def counted(self, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.metrics.statuses[str(message["status"])] += 1
        await send(message)

    async def reply(self, reply: HttpReply, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.statuses[str(reply.status_code)] += 1
        if scope["type"] == "http":
            scope["answer"](reply.status_code, reply.raw_headers, reply.body)
        else:
            await reply(scope, receive, send)

    def check_caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises BadRequest for one who may not call."""
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None and origin.partition(b"://")[2] != host:
            raise BadRequest(f"a page of {origin.decode('latin-1')} may not call this service", 403)
        if self.only_plain_hosts and not is_plain(host.decode("latin-1")):
            why = "is not this machine's address; use 127.0.0.1 or localhost"
            raise BadRequest(f"the host name {host.decode('latin-1')} {why}", 403)
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if scope["path"].startswith(TOKEN_PREFIX):
            secret, slash, rest = scope["path"].removeprefix(TOKEN_PREFIX).partition("/")
            given, scope["path"] = secret.encode(), slash + rest
        if scope["path"] not in OPEN_PATHS:
            CALLER.set(self.service.tokens.caller_of(given, (scope["client"] or [""])[0]))

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        """What serves it, and what stands in the path for `{id}`. Raises BadRequest."""
        method = "GET" if method == "HEAD" else method
        if (endpoint := self.endpoints.get((method, path))) is not None:
            return endpoint, ""
        before, names, after = (parts := path.split("/"))[:3], parts[3:4], parts[4:]
        general = "/".join([*before, "{id}", *after])
        if (endpoint := self.endpoints.get((method, general))) is not None:
            return endpoint, "".join(names)
        if any(known in (path, general) for _, known in self.endpoints) or path == "/mcp":
            raise BadRequest(f"{path} is not called by {method}; see GET /docs", 405)
        raise BadRequest(f"there is no {path} here; GET /docs lists what there is", 404)


@lru_cache(maxsize=1024)
def is_plain(host: str) -> bool:
    """`localhost` or an address, with or without a port. Browsers always send one; old clients may send none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is None or core.is_loopback(name) or name.replace(".", "").isdigit() or ":" in name


async def read(receive: Receive, held: Hold) -> bytes:
    """A body. Raises BadRequest: 413 for one over the limit, 503 when others fill the memory set aside. One that comes
    too slowly is ended from below (`server`)."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the caller left while it sent the body")
        more, chunk = message["more_body"], message["body"]
        body += chunk
        if len(body) > core.MAX_BODY_BYTES:
            raise BadRequest(f"the body is longer than {core.MAX_BODY_BYTES} bytes; send it in parts", 413)
        if len(body) > core.SMALL_BYTES:
            held.resize(len(body))
    held.close = None
    return bytes(body)


def again(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read."""
    whole = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return whole.pop() if whole else await receive()

    return given


def refused(error: Exception) -> HttpReply:
    """`{"error": sentence}`; 422, which only the other services' paths answer, names it `detail` as they do. What is
    neither the caller's nor the client's error is a bug of ours: its traceback goes to the log."""
    if isinstance(error, SandboxDown):
        error = BadRequest(str(error), 503, 1)
    elif not isinstance(error, BadRequest):
        core.LOG.error("a request failed", exc_info=error)
        error = BadRequest(f"the service failed ({type(error).__name__}); its log says where", 500)
    headers = {"connection": "close"} if error.status in (413, 503) else {}  # the rest of the body is not read
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return HttpReply(encode({"detail" if error.status == 422 else "error": str(error)}), error.status, headers)


class Joining(Struct, forbid_unknown_fields=True):
    address: str


class Nodes:
    """Nodes that joined a gateway. One that has not said so again for a while is dropped."""

    SILENT_SECONDS = 10.0

    def __init__(self, service: Service) -> None:
        self.token, self.min_isolation = service.tokens.first, service.settings.min_isolation
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("POST", "/v1/nodes", self.serve_join, "Join this gateway for a while.", Joining)]

    async def serve_join(self, asked: Asked) -> HttpReply:
        address, client = decode(asked.body, Joining).address, asked.service.client
        if address in self.timers:
            self.timers[address].cancel()
        else:
            try:
                client.add(address, token=self.token, min_isolation=self.min_isolation)
            except SandboxDown as error:
                raise BadRequest(str(error)) from None

        def drop() -> None:
            del self.timers[address]
            client.remove(address)

        self.timers[address] = asyncio.get_running_loop().call_later(self.SILENT_SECONDS, drop)
        return HttpReply(encode({"nodes": sorted(self.timers)}))


class Pages:
    """What the service says of itself."""

    def __init__(self, service: Service, metrics: Metrics, endpoints: Iterable[Endpoint]) -> None:
        self.service, self.metrics = service, metrics
        self.all = [*endpoints, *self.endpoints()]

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/v1/status", self.status, "Isolation, queue, slots, calls by outcome, nodes."),
            Endpoint("GET", "/metrics", self.prometheus, "The same and more for Prometheus."),
            Endpoint("GET", "/v1/ping", code_judge.ping, '"pong"; needs no token.'),
            Endpoint("GET", "/openapi.json", self.openapi, "This description."),
            Endpoint("GET", "/docs", self.docs, "The same for people."),
            Endpoint("GET", "/", self.docs, "The same for people."),
        ]

    async def status(self, asked: Asked) -> HttpReply:
        client, usage = self.service.client, self.service.usage()
        nodes = [node.state() for node in client.nodes]
        try:
            info = structs.asdict(client.info())
        except SandboxDown as error:
            if not nodes:
                raise
            return HttpReply(encode({"error": str(error), "nodes": nodes}), 503)
        rest = {
            "num_workers": info["slots"],
            "queue": usage.waiting,
            "running": usage.running,
            "sessions": usage.sessions,
            "uptime_seconds": round(time.time() - self.service.started, 3),
            "calls": self.metrics.outcomes,
            "cpu_seconds": round(usage.cpu_seconds + time.process_time(), 3),
            "nodes": nodes,
        }
        return HttpReply(encode(info | rest))

    async def prometheus(self, asked: Asked) -> HttpReply:
        return HttpReply(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, asked: Asked) -> HttpReply:
        """OpenAPI 3.1."""
        shapes = dict.fromkeys([Response, *(endpoint.shape for endpoint in self.all if endpoint.shape is not None)])
        _, schemas = msgspec.json.schema_components(shapes, ref_template=REF)
        paths: dict[str, Any] = {}
        for endpoint in self.all:
            responses = {status: {"description": means} for status, means in STATUSES.items()}
            described: dict[str, Any] = {"summary": endpoint.says, "responses": responses}
            if endpoint.shape is not None:
                schema = {"schema": {"$ref": REF.format(name=endpoint.shape.__name__)}}
                described["requestBody"] = {"content": {"application/json": schema}}
            if "{id}" in endpoint.path:
                described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = described
        info = {"title": "rocstar sandbox", "version": version("rocstar"), "description": native.__doc__}
        components = {"schemas": schemas}
        return HttpReply(encode({"openapi": "3.1.0", "info": info, "paths": paths, "components": components}))

    async def docs(self, asked: Asked) -> HttpReply:
        rows = "".join(
            f"<tr><td>{endpoint.method}<td><code>{endpoint.path}</code><td>{html.escape(endpoint.says)}"
            for endpoint in self.all
        )
        means = "".join(f"<tr><td>{status}<td>{html.escape(sentence)}" for status, sentence in STATUSES.items())
        page = f"<!doctype html><title>rocstar sandbox</title><table>{rows}</table><table>{means}</table>"
        page += '<p>Fields: <a href="openapi.json">openapi.json</a>'
        return HttpReply(page.encode(), media_type="text/html; charset=utf-8")
