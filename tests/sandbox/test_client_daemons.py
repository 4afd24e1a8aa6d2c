"""One client over real daemons: children that start, die, freeze and end with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from rocstar.sandbox.call import Call, DaemonSettings, Limits, Response, SandboxDown
from rocstar.sandbox.client import SandboxClient, run_once
from rocstar.sandbox.client.node import ChildConnection

WAIT_SECONDS = 60.0  # a bound on what would otherwise be for ever
LIMITS = Limits(wall_seconds=30.0, cpu_seconds=30.0)
NAP = "import time\ntime.sleep(0.5)\n'done'"


@contextmanager
def started(daemons: int = 1, silent_seconds: float = 30.0, **settings: Any) -> Iterator[SandboxClient]:
    values = DaemonSettings(**{"slots": 2, "preload": ()} | settings)
    with SandboxClient(values, daemons=daemons, silent_seconds=silent_seconds) as client:
        client.launch()
        client.await_hello()
        yield client


def process(client: SandboxClient, number: int = 0) -> psutil.Process:
    connection = client.nodes[number].connection
    assert isinstance(connection, ChildConnection)
    return psutil.Process(connection.process.pid)


async def run(client: SandboxClient, code: str) -> Response:
    return await asyncio.wait_for(client.run(Call(id="x", code=code, limits=LIMITS)), WAIT_SECONDS)


async def ended(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=WAIT_SECONDS)
    assert not alive


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_child_that_dies_or_freezes_is_replaced_and_its_calls_run_again(how: signal.Signals) -> None:
    with started(silent_seconds=1.0) as client:
        first = process(client)
        family = [first, *first.children(recursive=True)]
        calls = [asyncio.ensure_future(run(client, NAP)) for _ in range(4)]
        await asyncio.sleep(0.2)
        first.send_signal(how)
        responses = await asyncio.gather(*calls)
        assert {each.value for each in responses} == {"'done'"} and max(each.attempt for each in responses) == 2
        assert process(client).pid != first.pid
        await ended(family)


async def test_a_child_that_froze_between_calls_is_replaced_by_the_next() -> None:
    with started(silent_seconds=1.0) as client:
        process(client).send_signal(signal.SIGSTOP)
        assert (await run(client, "1")).value == "1"


async def test_a_busy_child_that_says_nothing_for_longer_is_left_alone() -> None:
    with started(silent_seconds=1.0) as client:
        first = process(client).pid
        response = await run(client, "import time; time.sleep(1.5)")
        assert response.attempt == 1 and process(client).pid == first
        assert client.usage().cpu_seconds == client.cpu_seconds() > 0


async def test_closing_ends_the_daemon_and_all_below_it() -> None:
    with started(daemons=2) as client:
        task = asyncio.ensure_future(run(client, "import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        family = [each for n in (0, 1) for each in [process(client, n), *process(client, n).children(recursive=True)]]
    with pytest.raises(SandboxDown, match="was closed"):
        await task
    with pytest.raises(SandboxDown, match="is closed"):
        await run(client, "1")
    client.close()
    await ended(family)


async def test_a_client_that_was_never_launched_starts_its_daemon_at_the_first_call() -> None:
    with SandboxClient(DaemonSettings(slots=1, preload=("no_such_module",))) as client:
        for _ in range(2):
            with pytest.raises(SandboxDown, match="no_such_module"):
                await run(client, "1")
    with SandboxClient(DaemonSettings(slots=1, preload=())) as client:
        assert (await run(client, "1")).value == "1"


def test_one_program_alone() -> None:
    response = run_once("print(input())\n7", stdin="hello\n")
    assert (response.stdout, response.value) == ("hello\n", "7")
