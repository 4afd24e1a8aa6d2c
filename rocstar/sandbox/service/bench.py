"""`rocstar sandbox bench`: the three measured programs against one service, from one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rocstar.sandbox.service.connection import Address
from rocstar.sandbox.service.load import PROGRAMS, bench
from rocstar.sandbox.service.remote import ask, checked
from rocstar.sandbox.wire import SandboxDown

HEADER = ("program", "calls", "right", "calls_per_second", "p50_ms", "p95_ms", "p99_ms", "cpu_ms_per_call")


def run_bench(address: Address, *, callers: int, calls: int) -> list[dict[str, Any]]:
    """One row per program. Raises SandboxDown when the service cannot be reached."""
    return [measure(address, name, callers, calls) for name in PROGRAMS]


def measure(address: Address, name: str, callers: int, calls: int) -> dict[str, Any]:
    before = settled_cpu_seconds(address)
    try:
        tally = asyncio.run(bench(address, PROGRAMS[name], callers, calls))
    except OSError as error:
        raise SandboxDown(
            f"the sandbox service at {address.host}:{address.port} stopped answering ({error})"
        ) from error
    cpu_ms = 1000 * (settled_cpu_seconds(address) - before) / calls
    return {"program": name, "calls": calls, "callers": callers, **tally.figures(), "cpu_ms_per_call": round(cpu_ms, 2)}


def settled_cpu_seconds(address: Address) -> float:
    """CPU of the whole service so far; it notes that every half second."""
    time.sleep(1.0)
    status = checked(ask(address, "GET", "/v1/status"))
    cpu: float = status["cpu_seconds"]
    return cpu


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["".join(f"{name:>17}" for name in HEADER)]
    lines += ["".join(f"{row[name]:>17}" for name in HEADER) for row in rows]
    return "\n".join(lines)
