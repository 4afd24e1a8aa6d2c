"""Is the process at the other end alive and well, or only alive? A stopped or hung one closes no connection.

Time is counted in ticks and not read from a clock: a caller whose own event loop stood still for minutes (a long
optimizer step, Ctrl-Z, a laptop that slept) finds one tick overdue, not a hundred, and blames nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICKS = 10  # questions that must stay without any sign of life


class Watchdog:
    """Consumes signs of life (`heard`) and ticks; produces a question per tick while somebody waits for the other end,
    and calls `on_frozen` once `patience` seconds of ticks have passed in silence."""

    def __init__(
        self, *, seconds: float, waiting: Callable[[], bool], ask: Callable[[], None], on_frozen: Callable[[], None]
    ) -> None:
        """seconds: silence that counts as frozen; `patience` may be set to more for a while. waiting: whether anybody
        waits for the other end; silence is no offence where nobody does."""
        self.patience = seconds
        self._tick_seconds = seconds / TICKS
        self._waiting = waiting
        self._ask = ask
        self._on_frozen = on_frozen
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tick in this loop."""
        self.stop()
        self._arm(loop)

    def stop(self) -> None:
        """Forget what was, and rest."""
        self._silent_ticks = 0
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def heard(self) -> None:
        """The other end said something."""
        self._silent_ticks = 0

    def tick(self) -> None:
        """`_tick_seconds` have passed."""
        if not self._waiting():
            self._silent_ticks = 0
        elif self._silent_ticks * self._tick_seconds >= self.patience:
            self._silent_ticks = 0
            self._on_frozen()
        else:
            self._silent_ticks += 1
            self._ask()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._tick_seconds, self._tick_and_arm, loop)

    def _tick_and_arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._arm(loop)
        self.tick()
