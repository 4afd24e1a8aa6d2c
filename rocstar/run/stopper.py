"""Ctrl-C, a scheduler's SIGTERM, or the SIGHUP of a closed terminal, during a run: attempts under way are given up,
updates under way are finished.

The weights between two updates of a step belong to no step, so a step that has changed them is finished first, and so
is a record being written. All other work can be repeated and ends at once. A second signal ends the process. SIGHUP is
neither a second nor makes another one second: shell and kernel both send it, a logout SIGTERM with it, and Python
handles SIGHUP first. Where it is ignored, as under nohup, it stays so.

Python runs a handler only when the main thread returns from a C call. An exchange with a learner rank that is stopped,
not dead, does not return for half an hour. So a thread also receives signals (`support/signals.py`), and ends the ranks
if the main thread does not handle the second one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from rocstar.support.signals import END_SECONDS, end_at_once, heard

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_SECONDS = 2.0  # for the main thread to handle a signal: longer than most calls of a step, short for a person
LOOK_SECONDS = 0.05

T = TypeVar("T")


class Stopper:
    """Decides the effect of a signal."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` shows a sentence to the user."""
        self._note = note
        self._held = 0
        self._came = self._taken = self._seen = 0
        self._over = threading.Event()
        self._broken_off = False
        self._task: asyncio.Task[object] | None = None
        self.asked = False
        """Whether the run is to stop."""
        self._half_changed: Callable[[], bool] = lambda: False
        self.break_off: Callable[[], None] = lambda: None
        """Makes the main thread's blocking call fail; called by another thread."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals within this context. Raises KeyboardInterrupt for a run that was stopped."""
        numbers = SIGNALS[: -1 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else None]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            with heard(self._heard):
                yield
        except asyncio.CancelledError:
            if not self.asked:
                raise
            raise KeyboardInterrupt from None
        finally:
            self._over.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def stops(self, task: asyncio.Task[object] | None) -> None:
        """Name the task that carries out the run; it is cancelled to stop the run."""
        self._task = task

    @contextmanager
    def finishing(self, half_changed: Callable[[], bool]) -> Iterator[None]:
        """Within this context a step with some of its updates done is finished first."""
        self._half_changed = half_changed
        try:
            yield
        finally:
            self._half_changed = lambda: False

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Work within this context is finished first."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @property
    def finishes(self) -> bool:
        """Whether work is under way that must be finished."""
        return self._held > 0 or self._half_changed()

    def _on_signal(self, number: int, frame: object) -> None:
        counts, is_first, self.asked = number != signal.SIGHUP, not self.asked, True
        again = counts and (self._taken > 0 or self._broken_off)
        self._taken += counts
        if not again and (not is_first or self.finishes):
            return
        # Interrupt the run's own task if it is computing. If it waits, cancel it: an exception raised in one of many
        # attempts would leave the others running.
        task = self._task
        if task is None or task.done() or asyncio.current_task(task.get_loop()) is task:
            raise KeyboardInterrupt
        task.get_loop().call_soon_threadsafe(task.cancel)

    def _heard(self, number: int) -> None:
        """Runs in a thread. The main thread handles several pending signals of one number as one, so this counts how
        many came, and whether any was handled since the last."""
        if number not in SIGNALS[:-1]:
            return
        self._came += 1
        if self._came == 1 and self.finishes:
            self._note("finishing this update, then saving; press Ctrl-C again to stop at once")
        elif not self._is_taken():
            if self._came == 1:  # one pass of a real model on a CPU takes longer
                self._note("waiting for the computation under way; press Ctrl-C again to stop at once")
            else:
                self._broken_off = True
                os.kill(os.getpid(), number)  # two signals handled as one have only requested a save
                self.break_off()
        self._seen = self._taken
        if self._came > 1 and not self._over.wait(END_SECONDS):
            end_at_once()

    def _is_taken(self) -> bool:
        """Whether the main thread handles the signal in time, or has left the run by then."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self._taken == self._seen and time.monotonic() < until and not self._over.wait(LOOK_SECONDS):
            pass
        return self._taken > self._seen or self._over.is_set()


async def in_thread(
    work: Callable[[], T], *, inside: AbstractContextManager[Any], break_off: Callable[[], None] = lambda: None
) -> T:
    """Run `work` in thread `learner`, inside a context of that thread, while the event loop continues.

    When the caller is cancelled, `work` is ended at its next line of Python, as Ctrl-C ends the main thread. The caller
    waits for that, because it may release what `work` still uses. `break_off` must make any wait of `work` outside of
    Python fail."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # so that its result is set even if no caller waits any more

    def run() -> None:
        with suppress(SystemExit):  # of PyThreadState_SetAsyncExc
            try:
                with inside:
                    done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    thread = threading.Thread(target=run, name="learner", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        break_off()
        thread.join()
        raise
