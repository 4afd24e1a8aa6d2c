"""Every way to isolate that this machine permits, and the fork path without the compiled part."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.jail import PLANS
from rocstar.sandbox.session import Session
from rocstar.sandbox.wire import Limits, SandboxDown
from tests.sandbox.support import ended

WAYS = [*((n, True) for n in range(len(PLANS) - 1)), (0, False)]
NAMES = [PLANS[n].name + ("" if compiled else "-python") for n, compiled in WAYS]
LISTING = "import os\nsorted(name for name in os.listdir('.') if not os.path.ismount(name))"
LIMITS = Limits(wall_seconds=20.0, cpu_seconds=10.0)


def started(way: tuple[int, bool]) -> Iterator[SandboxClient]:
    """A client of this way; skips where it is not to be had. For fixtures with `params=WAYS, ids=NAMES`."""
    number, compiled = way
    yield from launched(SandboxClient(slots=2, preload=(), skip_plans=number, compiled=compiled), number)


def launched(sandbox: SandboxClient, number: int) -> Iterator[SandboxClient]:
    """A client that skips the first `number` plans, launched; skips the test where that plan is not to be had."""
    sandbox.launch()
    with sandbox:
        try:
            sandbox.await_hello()
        except SandboxDown as error:
            if "can be started here" not in str(error):
                raise
            pytest.skip(f"{PLANS[number].name} is not to be had here: {error}")
        if sandbox.info().walls != PLANS[number].level:
            pytest.skip(f"{PLANS[number].name} is not to be had here, only {sandbox.info().walls}")
        yield sandbox


def opened(client: SandboxClient, **limits: float) -> Session:
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | limits
    return client.open_session(limits=Limits(**values), seed=5)


async def values(session: Session, *cells: str) -> list[str | None]:
    return [(await session.run(cell)).value for cell in cells]


def below(client: SandboxClient) -> list[psutil.Process]:
    """All that is alive below the host."""
    every = psutil.Process(client.process.pid).children(recursive=True)
    return [process for process in every if not ended(process)]
