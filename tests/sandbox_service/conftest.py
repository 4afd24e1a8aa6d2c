from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox_service.support import Http, RunningService


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """One service for all tests that do not break it."""
    running = RunningService(slots=4)
    yield running
    assert running.stop() == 0


@pytest.fixture
def http(service: RunningService) -> Http:
    return Http(service.url)
