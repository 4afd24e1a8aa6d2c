"""A host that is stopped but alive: noticed, replaced, and told as ours; a host that is only busy is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.watchdog import TICKS, Watchdog
from rocstar.sandbox.wire import SandboxDown
from tests.sandbox.support import ended, eventually, program_processes, run

WAIT_SECONDS = 60.0  # a bound on what would otherwise be for ever


@pytest.fixture
def wary_client() -> Iterator[SandboxClient]:
    """A sandbox that takes two seconds of silence for a frozen host."""
    client = SandboxClient(slots=1, preload=(), silent_seconds=2.0)
    client.launch()
    client.await_hello()
    with client:
        yield client


async def under_way(client: SandboxClient, code: str) -> asyncio.Task[object]:
    task = asyncio.ensure_future(run(client, code))
    assert await asyncio.to_thread(eventually, lambda: bool(program_processes(client)))
    return task


async def test_a_stopped_host_is_killed_with_all_below_it_and_its_call_is_run_again(wary_client: SandboxClient) -> None:
    first = psutil.Process(wary_client.process.pid)
    family = [first, *first.children(recursive=True)]
    task = asyncio.ensure_future(run(wary_client, "import time\ntime.sleep(0.5)\nprint('done')"))
    await asyncio.sleep(0)
    first.send_signal(signal.SIGSTOP)
    response = await asyncio.wait_for(task, WAIT_SECONDS)
    assert (response.stdout, response.attempt) == ("done\n", 2)
    assert wary_client.process.pid != first.pid
    assert await asyncio.to_thread(eventually, lambda: all(map(ended, family)))


async def test_a_call_whose_hosts_are_stopped_twice_learns_that_the_sandbox_is_down(wary_client: SandboxClient) -> None:
    task = await under_way(wary_client, "import time\ntime.sleep(60)")
    first = wary_client.process.pid
    os.kill(first, signal.SIGSTOP)
    assert await asyncio.to_thread(eventually, lambda: wary_client.process.pid != first, WAIT_SECONDS)
    greeted = partial(eventually, lambda: wary_client.watchdog.patience == 2.0, WAIT_SECONDS)
    assert await asyncio.to_thread(greeted), "a host that starts may be silent for two minutes"
    os.kill(wary_client.process.pid, signal.SIGSTOP)
    with pytest.raises(SandboxDown, match="gave no sign of life for 2 seconds and was killed"):
        await asyncio.wait_for(task, WAIT_SECONDS)
    assert (await run(wary_client, "1")).value == "1"


async def test_a_host_stopped_between_calls_is_replaced_by_the_next(wary_client: SandboxClient) -> None:
    os.kill(wary_client.process.pid, signal.SIGSTOP)
    assert (await asyncio.wait_for(run(wary_client, "1"), WAIT_SECONDS)).value == "1"


async def test_a_host_that_is_busy_for_longer_than_that_answers_and_stays(wary_client: SandboxClient) -> None:
    first = wary_client.process.pid
    waiting = [run(wary_client, "import time\ntime.sleep(1.5)\n7") for _ in range(3)]
    responses = await asyncio.gather(*waiting)
    assert [(response.value, response.attempt) for response in responses] == [("7", 1)] * 3
    assert wary_client.process.pid == first


class Other:
    """The other end of a watchdog of ten seconds, ticked by hand."""

    def __init__(self) -> None:
        self.asked = self.frozen = 0
        self.awaited = True
        self.dog = Watchdog(seconds=10.0, waiting=lambda: self.awaited, ask=self.ask, on_frozen=self.freeze)

    def ask(self) -> None:
        self.asked += 1

    def freeze(self) -> None:
        self.frozen += 1


def test_every_question_may_stay_open_once_before_silence_counts() -> None:
    other = Other()
    for _ in range(TICKS):
        other.dog.tick()
    assert (other.asked, other.frozen) == (TICKS, 0)
    other.dog.tick()
    assert (other.asked, other.frozen) == (TICKS, 1)


def test_one_sign_of_life_forgives_all_silence_before_it() -> None:
    other = Other()
    for _ in range(3):
        for _ in range(TICKS):
            other.dog.tick()
        other.dog.heard()
    assert other.frozen == 0


def test_silence_towards_nobody_is_no_offence() -> None:
    other = Other()
    other.awaited = False
    for _ in range(5 * TICKS):
        other.dog.tick()
    assert (other.asked, other.frozen) == (0, 0)


def test_one_that_still_starts_is_given_more_time() -> None:
    other = Other()
    other.dog.patience = 20.0
    for _ in range(2 * TICKS):
        other.dog.tick()
    assert other.frozen == 0
    other.dog.tick()
    assert other.frozen == 1


async def test_a_caller_whose_own_loop_stood_still_blames_nobody() -> None:
    other = Other()
    dog = Watchdog(seconds=0.1, waiting=lambda: True, ask=other.ask, on_frozen=other.freeze)
    dog.start(asyncio.get_running_loop())
    time.sleep(1.0)  # noqa: ASYNC251 - standing still is the point
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    dog.stop()
    assert (other.asked, other.frozen) == (1, 0)
