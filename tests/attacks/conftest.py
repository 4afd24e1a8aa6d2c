"""Every attack is tried against every way to isolate that this machine permits, not only the strongest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.jail import PLANS
from rocstar.sandbox.wire import SandboxDown

WAYS = [*((n, True) for n in range(len(PLANS) - 1)), (0, False)]  # plan, and whether slots run the compiled loop


@pytest.fixture(scope="session", params=WAYS, ids=[PLANS[n].name + ("" if fast else "-python") for n, fast in WAYS])
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    number, compiled = request.param
    plan = PLANS[number]
    sandbox = SandboxClient(slots=1, preload=(), skip_plans=number, compiled=compiled)
    sandbox.launch()
    try:
        sandbox.await_hello()
    except SandboxDown as error:
        sandbox.close()
        pytest.skip(f"{plan.name} is not to be had here: {error}")
    with sandbox:
        if sandbox.info().walls != plan.level:
            pytest.skip(f"{plan.name} ({plan.level}) is not to be had here, only {sandbox.info().walls}")
        yield sandbox
