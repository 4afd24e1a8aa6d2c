"""Every attack is tried against every way to isolate that this machine permits, not only the strongest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.walls.plans import PLANS
from tests.sandbox.driver import Daemon, daemon_of

WAYS = [plan.name for plan in PLANS[:-1]]


@pytest.fixture(scope="session", params=WAYS)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One slot, so that a call meets whatever the one before has left."""
    with daemon_of(request.param, slots=1) as started:
        yield started


@pytest.fixture(scope="module", params=WAYS)
def uncounted(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Where no control group counts processes."""
    with daemon_of(request.param, slots=1, groups=False) as started:
        yield started


@pytest.fixture(scope="session", params=WAYS)
def neighbours(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Two slots, whose programs run at once."""
    with daemon_of(request.param, slots=2) as started:
        yield started
