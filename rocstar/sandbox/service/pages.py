"""What the service says of itself: /status, /metrics, /ping, and the description of its API."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.responses import Response as HttpResponse

from rocstar.sandbox.service.http import Path, Service, json_response, service_of
from rocstar.sandbox.service.ledger import OUTCOMES, prometheus
from rocstar.sandbox.service.shapes import encode
from rocstar.sandbox.wire import HostInfo


def status_of(service: Service) -> dict[str, object]:
    """All that the sandbox says of itself, and the service's own state. `queue` and `num_workers` are what code-judge
    calls its waiting calls and its slots."""
    info, ledger, settings = service.info(), service.ledger, service.settings
    slots = info.slots * settings.workers
    return {
        **{name: getattr(info, name) for name in HostInfo.__slots__},
        "slots": slots,
        "num_workers": slots,
        "queue": int(ledger.total("waiting")),
        "running": int(ledger.total("running")),
        "processes": settings.workers,
        "processes_ready": int(ledger.total("ready")),
        "sessions": int(ledger.total("sessions")),
        "uptime_seconds": round(time.time() - service.started, 3),
        "calls": {outcome: int(count) for outcome in OUTCOMES if (count := ledger.total(outcome))},
        "cpu_seconds": round(ledger.total("cpu_seconds"), 3),
    }


async def status(request: Request) -> HttpResponse:
    """GET /status."""
    return json_response(encode(status_of(service_of(request))))


async def metrics(request: Request) -> HttpResponse:
    """GET /metrics, in Prometheus' text format, of all workers together."""
    service = service_of(request)
    info = service.info()
    facts = [
        "# TYPE rocstar_sandbox_info gauge",
        f'rocstar_sandbox_info{{isolation="{info.isolation}",failed_probes="{" ".join(info.failed_probes)}"}} 1',
        "# TYPE rocstar_sandbox_slots gauge",
        f"rocstar_sandbox_slots {info.slots * service.settings.workers}",
    ]
    return PlainTextResponse(prometheus(service.ledger, facts), media_type="text/plain; version=0.0.4")


async def ping(request: Request) -> HttpResponse:
    """GET /ping: "pong"."""
    return json_response(b'"pong"')


PATHS: list[Path] = [
    ("GET", "/status", status),
    ("GET", "/v1/status", status),
    ("GET", "/metrics", metrics),
    ("GET", "/ping", ping),
    ("GET", "/v1/ping", ping),
]
