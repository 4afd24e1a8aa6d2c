"""What the sandbox tests share: one way to run a program, and ways to look at the process tree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import psutil

from rocstar.sandbox.call import Call, Limits, Response
from rocstar.sandbox.client import SandboxClient

LIMITS = Limits(wall_seconds=10.0, cpu_seconds=10.0)
NUMBERS = itertools.count()


async def run(client: SandboxClient, code: str, **fields: Any) -> Response:
    """One call; `fields` replace those of LIMITS and of a Call."""
    limits = {name: fields.pop(name, getattr(LIMITS, name)) for name in Limits.__struct_fields__}
    return await client.run(
        Call(id=f"test-{next(NUMBERS)}", code=code, limits=Limits(**limits), **({"seed": 0} | fields))
    )


def daemon_process(client: SandboxClient) -> psutil.Process:
    """The daemon of a client that has one."""
    connection: Any = client.nodes[0].connection
    return psutil.Process(connection.process.pid)


def keeper_processes(client: SandboxClient) -> list[psutil.Process]:
    """Below the daemon come its zygotes, a keeper per slot, the slot, and its program."""
    return at_depth(client, 2)


def slot_processes(client: SandboxClient) -> list[psutil.Process]:
    return at_depth(client, 3)


def program_processes(client: SandboxClient) -> list[psutil.Process]:
    """First processes of programs."""
    return at_depth(client, 4)


def at_depth(client: SandboxClient, depth: int) -> list[psutil.Process]:
    row = [daemon_process(client)]
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
