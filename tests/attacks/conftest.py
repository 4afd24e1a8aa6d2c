"""Every attack is tried against every way to isolate that this machine permits, not only the strongest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.call import DaemonSettings, SandboxDown
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.walls.plans import PLANS

WAYS = [*((n, True) for n in range(len(PLANS) - 1)), (0, False)]
"""Plan, and whether slots run the compiled loop."""
NAMES = [PLANS[n].name + ("" if compiled else "-python") for n, compiled in WAYS]


@pytest.fixture(scope="session", params=WAYS, ids=NAMES)
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """One slot, so that a call meets whatever the one before has left."""
    number, compiled = request.param
    yield from started(number, slots=1, compiled=compiled)


@pytest.fixture(scope="session", params=[0, 1, 2], ids=[PLANS[n].name for n in range(3)])
def neighbours(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """Two slots, whose programs run at once."""
    yield from started(request.param, slots=2)


def started(number: int, *, slots: int, compiled: bool = True) -> Iterator[SandboxClient]:
    """A client of this plan; skips the test where it is not to be had."""
    plan = PLANS[number]
    settings = DaemonSettings(slots=slots, preload=(), skip_plans=number, compiled=compiled)
    with SandboxClient(settings) as sandbox:
        sandbox.launch()
        try:
            sandbox.await_hello()
        except SandboxDown as error:
            if "can be started here" not in str(error):
                raise
            pytest.skip(f"{plan.name} is not to be had here: {error}")
        if sandbox.info().walls != plan.level:
            pytest.skip(f"{plan.name} ({plan.level}) is not to be had here, only {sandbox.info().walls}")
        yield sandbox
