"""Handles signals in a thread, even while the main thread is blocked.

Python runs a handler only when the main thread returns from a C call. A thread learns of the signal at once, by a
descriptor that Python writes to. A KeyboardInterrupt that is raised inside a destructor or a callback is lost, and
imports run many of these: the signal is then sent again. Not here: what handlers do."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rocstar.support.exits import INTERRUPTED

END_SECONDS = 1.0  # for resources to be released after the second signal
AGAIN_SECONDS = 0.02  # until a destructor that lost a KeyboardInterrupt has ended


@contextmanager
def heard(act: Callable[[int], None]) -> Iterator[None]:
    """Within this context `act` is called in a thread with each signal that has a Python handler; contexts must not
    nest. Must be entered by the main thread."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    with writing:  # the thread reads its end
        threading.Thread(target=_hear, args=(reading, act), name="signals", daemon=True).start()
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)


def _hear(reading: socket.socket, act: Callable[[int], None]) -> None:
    """Consumes numbers of signals, waits for nothing else; ends with the context."""
    with reading:
        while found := reading.recv(1):
            act(found[0])


class SecondEnds:
    """Ends this process END_SECONDS after the second Ctrl-C, whatever the first has reached. Children end with their
    parent, and files are renamed into place, so nothing is lost that a kill would not lose."""

    def __init__(self) -> None:
        self._came = 0
        self._lost = 0

    def lost(self) -> None:
        """A signal was lost and will come again."""
        self._lost += 1

    def came(self) -> bool:
        """Whether a Ctrl-C came, also one whose handler is running now."""
        time.sleep(AGAIN_SECONDS)
        return self._came > 0

    def __call__(self, number: int) -> None:
        self._came += number == signal.SIGINT
        if self._came - self._lost > 1:  # uvicorn sends itself one as it ends in order, and is gone by then
            time.sleep(END_SECONDS)
            end_at_once()


@contextmanager
def answered() -> Iterator[SecondEnds]:
    """While the context lasts, one Ctrl-C raises KeyboardInterrupt, also where Python loses the first, and two end this
    process. To be entered by the main thread."""
    second, ignored = SecondEnds(), sys.unraisablehook

    def on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            ignored(unraisable)
            return
        second.lost()
        again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = on_unraisable
    try:
        with heard(second):
            yield second
    finally:
        sys.unraisablehook = ignored


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """While the context lasts, SIGTERM and SIGHUP do what Ctrl-C does; ignored ones, as SIGHUP under nohup, stay so.
    To be entered by the main thread."""
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    handlers = dict.fromkeys(numbers, lambda number, frame: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a script starts in the background
        handlers[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once() -> None:
    """End this process without waiting for anything."""
    print("rocstar: stopped at once", file=sys.__stderr__, flush=True)
    os._exit(INTERRUPTED)
