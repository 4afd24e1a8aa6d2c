"""What the sandbox tests share: one way to run a program, and ways to look at the process tree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import psutil

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, Request, Response

LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10.0)
NUMBERS = itertools.count()


async def run(client: SandboxClient, code: str, *, stdin: str = "", seed: int = 0, **limits: float) -> Response:
    """One call; `limits` replace fields of LIMITS."""
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | limits
    request = Request(id=f"test-{next(NUMBERS)}", code=code, stdin=stdin, seed=seed, limits=Limits(**values))
    return await client.run(request)


def slot_processes(client: SandboxClient) -> list[psutil.Process]:
    """The slots' own processes: below the host, its nursery and, with namespaces, a guardian each."""
    below = psutil.Process(client.process.pid).children(recursive=True)
    return [process for process in below if not process.children() and process.ppid() != client.process.pid]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it comes true; the time is a bound on a wait, not a measurement."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
