"""Accounts of CPU seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rocstar.run.run import Meter


class Sandbox:
    cpu_seconds = 0.0

    def usage(self) -> Sandbox:
        return self


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_each_phase_gets_what_was_spent_inside_it_also_where_it_fails_and_accounts_start_anew() -> None:
    sandbox: Any = Sandbox()
    meter = Meter(sandbox)
    with meter.phase("a"):
        burn(0.02)
    with meter.phase("b"):
        pass
    with pytest.raises(ValueError, match="failed"), meter.phase("a"):
        burn(0.02)
        raise ValueError("failed")
    sandbox.cpu_seconds = 1.5
    taken = meter.take()
    assert taken["cpu/a"] >= 0.04 > taken["cpu/b"]
    assert taken["cpu/sandbox"] == 1.5
    sandbox.cpu_seconds = 1.75
    assert meter.take() == {"cpu/sandbox": 0.25}
