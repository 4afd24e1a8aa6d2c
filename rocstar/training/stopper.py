"""Ctrl-C, or a scheduler's SIGTERM, during a run: at once where there is nothing to save, else after the step under
way.

Python runs a handler only when the main thread is back from what it calls. An exchange with a learner rank that is
stopped, not dead, does not come back for half an hour. So a thread hears of signals too, by a descriptor that Python
writes to at once, and ends the ranks where a signal that should stop the run is not taken."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 2.0  # for the main thread to take a signal: longer than most calls of a step, short for a person
LOOK_SECONDS = 0.05


class Stopper:
    """While steps are made, the first Ctrl-C asks the run to save and stop after the current one, and the second stops
    at once. At any other time the first stops at once."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` tells a person a sentence."""
        self._note = note
        self._stepping = False
        self._taken = 0
        self._broken_off = False
        self.asked = False
        self.break_off: Callable[[], None] = lambda: None
        """Makes the call that the main thread waits in fail; called by another thread."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = {number: signal.signal(number, self._on_interrupt) for number in SIGNALS}
        descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="stopper", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            writing.close()  # the thread reads its end
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
        self._taken += 1
        if self.asked or self._broken_off or not self._stepping:
            raise KeyboardInterrupt
        self.asked = True
        self._note("finishing this step, then saving; press Ctrl-C again to stop at once")

    def _watch(self, reading: socket.socket) -> None:
        """Signals of one number that come while the main thread is away are taken as one, so what is counted here is
        how many came, and whether any was taken since the last."""
        came = taken = 0
        with reading:
            while found := reading.recv(1):
                if found[0] not in SIGNALS:
                    continue
                came += 1
                urgent = came > 1 or not self._stepping
                until = time.monotonic() + PATIENCE_SECONDS
                while urgent and self._taken == taken and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)
                if urgent and self._taken == taken:
                    self._broken_off = True
                    os.kill(os.getpid(), found[0])  # two that were taken as one have only asked for a save
                    self.break_off()
                    return
                taken = self._taken
