"""Every attack is tried against every way to isolate that this machine permits, not only the strongest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.walls.plans import PLANS
from tests.sandbox.driver import Daemon, Refused

WAYS = range(len(PLANS) - 1)
NAMES = [PLANS[n].name for n in WAYS]


@pytest.fixture(scope="session", params=WAYS, ids=NAMES)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One slot, so that a call meets whatever the one before has left."""
    yield from started(request.param, slots=1)


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def uncounted(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Where no control group counts processes."""
    yield from started(request.param, slots=1, groups=False)


@pytest.fixture(scope="session", params=WAYS, ids=NAMES)
def neighbours(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Two slots, whose programs run at once."""
    yield from started(request.param, slots=2)


def started(number: int, *, slots: int, groups: bool = True) -> Iterator[Daemon]:
    """A daemon of this plan; skips the test where it is not to be had."""
    plan = PLANS[number]
    try:
        sandbox = Daemon(slots=slots, skip_plans=number, groups=groups)
    except Refused as error:
        if "can be started here" not in str(error):
            raise
        pytest.skip(f"{plan.name} is not to be had here: {error}")
    with sandbox:
        if sandbox.info.isolation != plan.level:
            pytest.skip(f"{plan.name} ({plan.level}) is not to be had here, only {sandbox.info.isolation}")
        yield sandbox
