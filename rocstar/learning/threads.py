"""Threads: how many torch computes with, and one to learn in while the event loop serves others."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TypeVar

import torch
from torch.nn.functional import linear

T = TypeVar("T")
TRIES, MOST_TRIES, TIMED_SECONDS = 3, 100, 0.1


use_threads, threads_in_use = torch.set_num_threads, torch.get_num_threads
"""The first is a setting of the whole process, so only the verbs that own one call it."""


def seconds_of_product(hidden: int, intermediate: int, tokens: int, threads: int) -> float:
    """The best of some products of a feed-forward layer of these widths, for so many tokens, with so many threads."""
    torch.set_num_threads(threads)
    up, down, given = torch.ones(intermediate, hidden), torch.ones(hidden, intermediate), torch.ones(tokens, hidden)
    took: list[float] = []
    while len(took) < TRIES or (sum(took) < TIMED_SECONDS and len(took) < MOST_TRIES):
        began = time.perf_counter()
        linear(linear(given, up), down)
        took.append(time.perf_counter() - began)
    return min(took)


async def in_thread(work: Callable[[], T], *, device: torch.device, break_off: Callable[[], None] = lambda: None) -> T:
    """Run `work` in thread `learner`, with `device` as its GPU, while the event loop goes on.

    When the caller is cancelled, `work` is ended at its next line of Python, as Ctrl-C ends the main thread. The caller
    waits for that, because it may release what `work` still uses. `break_off` must make any wait of `work` outside of
    Python fail."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # so that its result is taken also when nobody waits any more

    def run() -> None:
        with suppress(SystemExit):  # of PyThreadState_SetAsyncExc
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
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
