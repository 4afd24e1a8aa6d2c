from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient


@pytest.fixture(scope="session", params=["c", "python"])
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """One sandbox for all tests that do not break it; each is run on both fork paths."""
    sandbox = SandboxClient(slots=2, preload=(), compiled=request.param == "c")
    sandbox.launch()
    sandbox.await_hello()
    with sandbox:
        if sandbox.info().fork_path != request.param:
            pytest.skip("the compiled fork path was not built: pip install -e . with a C compiler builds it")
        yield sandbox


@pytest.fixture
def own_client() -> Iterator[SandboxClient]:
    """A sandbox that a test may break."""
    with SandboxClient.start(slots=1, preload=()) as sandbox:
        yield sandbox
