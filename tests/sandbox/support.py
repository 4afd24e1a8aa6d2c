"""What the sandbox tests share: one way to run a program, and ways to look at the process tree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import psutil

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, Request, Response

LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10.0)
NUMBERS = itertools.count()


async def run(client: SandboxClient, code: str, *, stdin: str = "", seed: int = 0, **limits: Any) -> Response:
    """One call; `limits` replace fields of LIMITS."""
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | limits
    request = Request(id=f"test-{next(NUMBERS)}", code=code, stdin=stdin, seed=seed, limits=Limits(**values))
    return await client.run(request)


def slot_processes(client: SandboxClient) -> list[psutil.Process]:
    """The slots themselves: below the host come its nursery, with namespaces a guardian per slot, then the slot."""
    return at_depth(client, slot_depth(client))


def program_processes(client: SandboxClient) -> list[psutil.Process]:
    return at_depth(client, slot_depth(client) + 1)


def slot_depth(client: SandboxClient) -> int:
    return 3 if client.info().walls == "L3" else 2


def at_depth(client: SandboxClient, depth: int) -> list[psutil.Process]:
    row = [psutil.Process(client.process.pid)]
    for _ in range(depth):
        row = [child for process in row for child in children(process)]
    return row


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def ended(process: psutil.Process) -> bool:
    """Dead, whether or not somebody has collected it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes true; the time is a bound on a wait, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
