"""Work of the learner beside the event loop: results, errors, the loop's own work, and its end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext, suppress
from typing import NoReturn

import pytest

pytest.importorskip("torch")

import torch

from rocstar.errors import RunHalted
from rocstar.run.stopper import in_thread


async def test_the_event_loop_goes_on_and_the_result_comes_back() -> None:
    served = threading.Event()
    asyncio.get_running_loop().call_later(0.01, served.set)
    assert (
        await in_thread(lambda: served.wait(60) and threading.current_thread().name, inside=nullcontext()) == "learner"
    )


async def test_the_thread_computes_with_as_many_threads_as_the_process_was_told() -> None:
    assert await in_thread(torch.get_num_threads, inside=nullcontext()) == torch.get_num_threads()


async def test_an_error_is_raised_where_it_is_waited_for() -> None:
    def work() -> NoReturn:
        raise RunHalted("no finite gradient")

    with pytest.raises(RunHalted, match="no finite gradient"):
        await in_thread(work, inside=nullcontext())


async def test_work_that_is_cancelled_has_ended_before_its_caller_goes_on() -> None:
    began, broken, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            with suppress(Exception):
                broken.wait()  # as an exchange with other ranks, which only their end makes fail
            while True:
                sum(range(100))
        finally:
            ended.set()

    caller = asyncio.create_task(in_thread(work, inside=nullcontext(), break_off=broken.set))
    await asyncio.to_thread(began.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set() and "learner" not in {thread.name for thread in threading.enumerate()}
