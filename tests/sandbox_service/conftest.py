from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocstar.sandbox.service.local import LocalService, start
from tests.sandbox_service.support import Http

OPTIONS = ("--preload", "", "--slots", "4", "--runnable", "2")


@pytest.fixture(scope="session")
def service() -> Iterator[LocalService]:
    """One service for all tests that do not break it: `rocstar sandbox serve`, as people start it."""
    running = start(OPTIONS)
    yield running
    assert running.stop() == 0


@pytest.fixture
def http(service: LocalService) -> Http:
    return Http(service.url)
