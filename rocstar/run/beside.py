"""Work of the learner in a thread of its own, while the event loop serves others."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T], *, inside: AbstractContextManager[Any], break_off: Callable[[], None] = lambda: None
) -> T:
    """Run `work` in thread `learner`, inside a context of that thread, while the event loop goes on.

    When the caller is cancelled, `work` is ended at its next line of Python, as Ctrl-C ends the main thread. The caller
    waits for that, because it may release what `work` still uses. `break_off` must make any wait of `work` outside of
    Python fail."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # so that its result is taken also when nobody waits any more

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
