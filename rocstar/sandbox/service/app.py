"""The ASGI application: access control, routing, and the service's status and metrics."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from itertools import accumulate
from urllib.parse import urlsplit

from msgspec import structs
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected

from rocstar.sandbox.call import CALLER, EVENTS, Response, SandboxDown
from rocstar.sandbox.service import core, dialects, native
from rocstar.sandbox.service.core import BadRequest, Endpoints, Hold, HttpRequest, Serve, Service, encode
from rocstar.sandbox.service.native import HttpReply

OPEN_PATHS = ("/ping", "/v1/ping", "/code-judge/ping")  # for load balancers; they reveal nothing
TOKEN_PREFIX = "/token/"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
PATHS = "docs/sandbox-service.md lists what there is"


class Histogram:
    """A Prometheus histogram of seconds."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def samples(self) -> Iterator[tuple[str, float]]:
        *below, total = accumulate(self.counts)
        yield from ((f'_bucket{{le="{bound}"}}', count) for bound, count in zip(BUCKETS, below, strict=True))
        yield from (('_bucket{le="+Inf"}', total), ("_count", total), ("_sum", self.sum))


class Metrics:
    """The service's metrics, in Prometheus's text format."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.ended, service.client.on_event = self.ended, self.event
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
        """An event of a daemon or a node, see `SandboxClient.on_event`."""
        self.events[kind] += 1
        core.LOG.warning("rocstar: %s", sentence)

    def text(self) -> str:
        return "".join(
            f"# TYPE rocstar_sandbox_{name} {kind}\n"
            + "".join(f"rocstar_sandbox_{name}{of} {n}\n" for of, n in samples)
            for name, kind, samples in self.families()
        )

    def families(self) -> Iterator[tuple[str, str, Iterable[tuple[str, float]]]]:
        """Name, kind, and values by the suffix of the name."""
        counted = (("calls", "outcome", self.outcomes), ("responses", "status", self.statuses))
        for name, label, counts in (*counted, ("node_events", "event", self.events)):
            yield f"{name}_total", "counter", [(f'{{{label}="{value}"}}', count) for value, count in counts.items()]
        nodes = self.service.client.nodes
        usage, up = structs.asdict(self.service.usage()), [node.slots for node in nodes if node.up]
        counters = {"requests": self.requests, "refused": self.refused, "disconnects": self.disconnects}
        counters["cpu_seconds"] = usage.pop("cpu_seconds") + time.process_time()
        for name, value in counters.items():
            yield f"{name}_total", "counter", [("", value)]
        yield "queue_seconds", "histogram", self.queue.samples()
        yield "run_seconds", "histogram", self.run.samples()
        usage |= {"nodes": len(nodes), "nodes_up": len(up), "slots": sum(up), "held_bytes": self.service.budget.size}
        for name, value in usage.items():
            yield name, "gauge", [("", value)]
        yield "build_info", "gauge", [(f'{{version="{version("rocstar")}"}}', 1)]


class Application:
    """Refuses before a body is read, serves, and answers every failure.

    `/token/SECRET/run_code` is `/run_code` with a token: for clients that can be configured with an address only."""

    def __init__(self, service: Service) -> None:
        self.service, self.metrics, settings = service, Metrics(service), service.settings
        # A page in the operator's browser can reach a loopback address under the page's own name (DNS rebinding).
        self.only_plain_hosts = not settings.token and core.is_loopback(settings.host)
        pages: Endpoints = {  # about the service itself
            ("GET", "/v1/status"): self.status,
            ("GET", "/metrics"): self.prometheus,
            ("GET", "/v1/ping"): dialects.ping,
        }
        self.endpoints = native.ENDPOINTS | dialects.ENDPOINTS | pages

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
        serve = self.find(scope.get("method", kind), path)
        with Hold(self.service.budget, scope["too_slow"]) as held:
            is_open = path in OPEN_PATHS  # their callers are unknown, so the service holds no body for them
            body = b"" if is_open else await read(receive, held)
            if len(body) > core.BIG_BODY_BYTES:
                await asyncio.sleep(0)  # other tasks first: decoding this body takes a while
            reply = await serve(HttpRequest(self.service, body, held))
        await self.reply(reply, scope, receive, send)

    async def reply(self, reply: HttpReply, scope: Scope, receive: Receive, send: Send) -> None:
        self.metrics.statuses[str(reply.status_code)] += 1
        if scope["type"] == "http":
            scope["answer"](reply.status_code, reply.raw_headers, reply.body)
        else:
            await reply(scope, receive, send)
            raise ClientDisconnected  # if a refusal of the handshake just returns, uvicorn logs an error

    def check_caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises BadRequest for a caller without access."""
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        if origin is not None and origin.partition(b"://")[2] != host:
            raise BadRequest(f"a page of {origin.decode('latin-1')} may not call this service", 403)
        if self.only_plain_hosts and not is_plain(host.decode("latin-1")):
            problem = "is not this machine's address; use 127.0.0.1 or localhost"
            raise BadRequest(f"the host name {host.decode('latin-1')} {problem}", 403)
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if scope["path"].startswith(TOKEN_PREFIX):
            secret, slash, rest = scope["path"].removeprefix(TOKEN_PREFIX).partition("/")
            given, scope["path"] = secret.encode(), slash + rest
        if scope["path"] not in OPEN_PATHS:
            CALLER.set(self.service.tokens.caller_of(given, (scope["client"] or [""])[0]))

    def find(self, method: str, path: str) -> Serve:
        """The function that serves a path. Raises BadRequest."""
        method = "GET" if method == "HEAD" else method
        if (serve := self.endpoints.get((method, path))) is not None:
            return serve
        if any(known == path for _, known in self.endpoints):
            raise BadRequest(f"{path} is not called by {method}; {PATHS}", 405)
        raise BadRequest(f"there is no {path} here; {PATHS}", 404)

    async def status(self, request: HttpRequest) -> HttpReply:
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
            "uptime_seconds": round(time.monotonic() - self.service.started, 3),
            "calls": self.metrics.outcomes,
            "cpu_seconds": round(usage.cpu_seconds + time.process_time(), 3),
            "nodes": nodes,
        }
        return HttpReply(encode(info | rest))

    async def prometheus(self, request: HttpRequest) -> HttpReply:
        return HttpReply(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@lru_cache(maxsize=1024)
def is_plain(host: str) -> bool:
    """`localhost` or an address, with or without a port. Browsers always send one; old clients may send none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is None or core.is_loopback(name) or name.replace(".", "").isdigit() or ":" in name


async def read(receive: Receive, held: Hold) -> bytes:
    """Read a body. Raises BadRequest: 413 if it is over the limit, 503 when other callers fill the budget. `server`
    ends a body that arrives too slowly."""
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


def refused(error: Exception) -> HttpReply:
    """`{"error": sentence}`; with 422, which only the other services' APIs use, the field is `detail` as there. Any
    exception but BadRequest and SandboxDown is a bug in rocstar: its traceback is logged."""
    if isinstance(error, SandboxDown):
        error = BadRequest(str(error), 503, 1)
    elif not isinstance(error, BadRequest):
        core.LOG.error("a request failed", exc_info=error)
        error = BadRequest(f"the service failed ({type(error).__name__}); its log says where", 500)
    headers = {"connection": "close"} if error.status in (413, 503) else {}  # the rest of the body is not read
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return HttpReply(encode({"detail" if error.status == 422 else "error": str(error)}), error.status, headers)
