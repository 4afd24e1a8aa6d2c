"""Accounts of CPU seconds."""

from __future__ import annotations

import time
from typing import Any

from rocstar.run.meter import Meter


class Sandbox:
    used = 0.0

    def cpu_seconds(self) -> float:
        return self.used


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_each_phase_gets_what_was_spent_inside_it() -> None:
    sandbox: Any = Sandbox()
    meter = Meter(sandbox)
    with meter.phase("a"):
        burn(0.02)
    with meter.phase("b"):
        pass
    with meter.phase("a"):
        burn(0.02)
    sandbox.used = 1.5
    taken = meter.take()
    assert taken["cpu/a"] >= 0.04 > taken["cpu/b"]
    assert taken["cpu/sandbox"] == 1.5


def test_taking_starts_the_accounts_anew() -> None:
    sandbox: Any = Sandbox()
    meter = Meter(sandbox)
    sandbox.used = 1.0
    meter.take()
    sandbox.used = 1.25
    assert meter.take() == {"cpu/sandbox": 0.25}


def test_other_processes_have_an_account_each() -> None:
    sandbox: Any = Sandbox()
    meter, used = Meter(sandbox), [2.0]
    meter.watch("engines", lambda: used[0])
    assert meter.take() == {"cpu/sandbox": 0.0, "cpu/engines": 2.0}
    used[0] = 2.5
    assert meter.take()["cpu/engines"] == 0.5


def test_a_phase_that_fails_is_counted_too() -> None:
    meter = Meter(Sandbox())  # type: ignore[arg-type]
    try:
        with meter.phase("a"):
            burn(0.01)
            raise ValueError
    except ValueError:
        pass
    assert meter.take()["cpu/a"] >= 0.01
