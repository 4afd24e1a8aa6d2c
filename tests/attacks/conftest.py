"""Every attack is tried against every way to isolate that this machine permits, not only the strongest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.jail import PLANS
from rocstar.sandbox.wire import SandboxDown


@pytest.fixture(scope="session", params=range(len(PLANS)), ids=[plan.name for plan in PLANS])
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    plan = PLANS[request.param]
    sandbox = SandboxClient(slots=1, preload=(), skip_plans=request.param)
    sandbox.launch()
    try:
        sandbox.await_hello()
    except SandboxDown as error:
        sandbox.close()
        pytest.skip(f"{plan.name} is not to be had here: {error}")
    with sandbox:
        if sandbox.info().isolation != plan.level:
            pytest.skip(f"{plan.name} ({plan.level}) is not to be had here, only {sandbox.info().isolation}")
        yield sandbox
