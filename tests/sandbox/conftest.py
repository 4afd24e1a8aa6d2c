from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient


@pytest.fixture(scope="session")
def client() -> Iterator[SandboxClient]:
    """One sandbox for all tests that do not break it."""
    with SandboxClient.start(slots=2, preload=()) as sandbox:
        yield sandbox


@pytest.fixture
def own_client() -> Iterator[SandboxClient]:
    """A sandbox that a test may break."""
    with SandboxClient.start(slots=1, preload=()) as sandbox:
        yield sandbox
