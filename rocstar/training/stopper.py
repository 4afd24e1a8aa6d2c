"""Ctrl-C, or a scheduler's SIGTERM, during a run: at once where there is nothing to save, else after the step under
way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopper:
    """While steps are made, the first Ctrl-C asks the run to save and stop after the current one, and the second stops
    at once. At any other time the first stops at once."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` tells a person a sentence."""
        self._note = note
        self._stepping = False
        self.asked = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """While this context lasts, a step under way is worth finishing."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _on_interrupt(self, number: int, frame: object) -> None:
        if self.asked or not self._stepping:
            raise KeyboardInterrupt
        self.asked = True
        self._note("finishing this step, then saving; press Ctrl-C again to stop at once")
