from __future__ import annotations

import pytest

from rocstar.rollout import episode


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once."""
    monkeypatch.setattr(episode, "RETRY_SECONDS", 0.0)
