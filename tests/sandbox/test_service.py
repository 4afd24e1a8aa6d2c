"""The service around programs: queueing, cancelling, dying and coming back, leaving nothing behind."""

from __future__ import annotations

import asyncio
import glob
import os
import subprocess
import sys
import textwrap
from functools import partial

import psutil
import pytest

from rocstar.sandbox.client import SandboxClient, run_once
from rocstar.sandbox.jail import CONFINED, PLANS
from rocstar.sandbox.wire import Isolation, ProgramOutcome, Request, Response, SandboxDown, ServiceOutcome
from tests.sandbox.support import ended, eventually, program_processes, run, slot_processes

SLEEP = "import time\ntime.sleep(30)"


async def started(client: SandboxClient, code: str) -> asyncio.Task[Response]:
    """A call whose program is running."""
    task = asyncio.ensure_future(run(client, code))
    assert await asyncio.to_thread(eventually, lambda: bool(program_processes(client)))
    return task


async def has_program(client: SandboxClient) -> psutil.Process:
    """The only slot, once its program runs."""
    assert await asyncio.to_thread(eventually, lambda: bool(program_processes(client)))
    return slot_processes(client)[0]


async def test_two_hundred_calls_at_once_all_get_their_own_answer(client: SandboxClient) -> None:
    responses = await asyncio.gather(*(run(client, f"print({n})", stdin="x" * n) for n in range(200)))
    assert [response.stdout for response in responses] == [f"{n}\n" for n in range(200)]


async def test_calls_start_in_the_order_they_came(own_client: SandboxClient) -> None:
    order: list[int] = []

    async def one(n: int) -> None:
        await run(own_client, "1")
        order.append(n)

    await asyncio.gather(*(one(n) for n in range(20)))
    assert order == list(range(20))


async def test_callers_keep_their_own_request_ids(client: SandboxClient) -> None:
    same = [client.run(Request(id="same", code=f"{n}")) for n in range(5)]
    responses = await asyncio.gather(*same)
    assert [(response.id, response.value) for response in responses] == [("same", f"{n}") for n in range(5)]


async def test_cancelling_the_awaiting_task_frees_the_slot(own_client: SandboxClient) -> None:
    task = await started(own_client, SLEEP)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    response = await run(own_client, "print('free')")
    assert response.stdout == "free\n"


async def test_cancelled_while_queued_never_runs(own_client: SandboxClient) -> None:
    running = await started(own_client, SLEEP)
    queued = asyncio.ensure_future(run(own_client, "print('never')"))
    await asyncio.sleep(0)
    queued.cancel()
    running.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    assert (await run(own_client, "1")).value == "1"
    assert own_client.pending == {}


async def test_slot_killed_under_a_call_costs_nothing_but_time(own_client: SandboxClient) -> None:
    code = "import time\ntime.sleep(0.5)\nprint('done')"
    slots = slot_processes(own_client)
    task = await started(own_client, code)
    slots[0].kill()
    response = await task
    assert (response.outcome, response.stdout, response.attempt) == (ProgramOutcome.OK, "done\n", 2)


async def test_call_that_loses_two_slots_is_our_fault_not_the_programs(own_client: SandboxClient) -> None:
    task = await started(own_client, SLEEP)
    for _ in range(2):
        slot = await has_program(own_client)
        slot.kill()
        assert await asyncio.to_thread(eventually, partial(ended, slot))
    response = await task
    assert response.outcome is ServiceOutcome.INTERNAL
    assert (await run(own_client, "1")).value == "1"


async def test_idle_slot_that_dies_is_replaced(own_client: SandboxClient) -> None:
    slot_processes(own_client)[0].kill()
    assert (await run(own_client, "1")).value == "1"


async def test_stopped_slot_is_given_up_and_its_call_retried() -> None:
    client = SandboxClient(slots=1, preload=(), grace_seconds=0.3)
    client.launch()
    client.await_hello()
    with client:
        slot_processes(client)[0].suspend()
        response = await run(client, "1", wall_seconds=0.1)
    assert (response.value, response.attempt) == ("1", 2)


async def test_killed_host_is_replaced_and_its_calls_are_run_again(own_client: SandboxClient) -> None:
    first = own_client.process.pid
    task = await started(own_client, "import time\ntime.sleep(0.3)\nprint('done')")
    os.kill(first, 9)
    response = await task
    assert (response.stdout, response.attempt) == ("done\n", 2)
    assert own_client.process.pid != first
    assert own_client.cpu_seconds() > 0


async def test_host_that_dies_twice_under_a_call_is_down(own_client: SandboxClient) -> None:
    task = await started(own_client, SLEEP)
    first = own_client.process.pid
    os.kill(first, 9)
    assert await asyncio.to_thread(eventually, lambda: own_client.process.pid != first)
    os.kill(own_client.process.pid, 9)
    with pytest.raises(SandboxDown, match="died under this call"):
        await task
    assert (await run(own_client, "1")).value == "1"


async def test_host_killed_between_calls_is_noticed_and_replaced(own_client: SandboxClient) -> None:
    os.kill(own_client.process.pid, 9)
    own_client.process.wait()
    assert (await run(own_client, "1")).value == "1"


def test_client_outlives_event_loops(own_client: SandboxClient) -> None:
    for n in range(3):
        assert asyncio.run(run(own_client, f"{n}")).value == f"{n}"


def test_calls_abandoned_with_their_loop_do_not_disturb_the_next(own_client: SandboxClient) -> None:
    async def abandon() -> None:
        task = await started(own_client, SLEEP)
        del task

    asyncio.run(abandon())
    assert asyncio.run(run(own_client, "1")).value == "1"


def test_close_leaves_no_process_and_no_descriptor() -> None:
    asyncio.run(asyncio.sleep(0))
    me = psutil.Process()
    before = me.num_fds()
    client = SandboxClient.start(slots=3, preload=())
    asyncio.run(run(client, "1"))
    family = psutil.Process(client.process.pid).children(recursive=True)
    client.close()
    client.close()
    assert me.num_fds() == before
    assert eventually(lambda: all(map(ended, family)))


@pytest.mark.parametrize("plan", range(len(PLANS)), ids=[plan.name for plan in PLANS])
def test_close_leaves_no_folder(plan: int) -> None:
    client = SandboxClient(slots=1, preload=(), skip_plans=plan, min_isolation=Isolation.L0)
    client.launch()
    try:
        client.await_hello()
        asyncio.run(run(client, "open('left', 'w').close()"))
    finally:
        client.close()
    assert glob.glob(f"{client.workdirs}*") == []


async def test_closed_client_says_so(own_client: SandboxClient) -> None:
    task = await started(own_client, SLEEP)
    own_client.close()
    with pytest.raises(SandboxDown, match="closed"):
        await task
    with pytest.raises(SandboxDown, match="closed"):
        await run(own_client, "1")


def test_everything_ends_when_the_trainer_is_killed() -> None:
    trainer = textwrap.dedent("""
        import asyncio, sys
        from rocstar.sandbox.client import SandboxClient
        from rocstar.sandbox.wire import Request
        client = SandboxClient.start(slots=2, preload=())
        print(client.process.pid, flush=True)
        asyncio.run(client.run(Request(id="1", code="import time; time.sleep(60)")))
    """)
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host = psutil.Process(int(process.stdout.readline()))
        assert eventually(lambda: len(host.children(recursive=True)) >= 4)
        family = [host, *host.children(recursive=True)]
        process.kill()
    assert eventually(lambda: all(map(ended, family)))


def test_isolation_below_the_minimum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    confined = PLANS.index(CONFINED)  # without namespaces no second kernel makes L4 of it
    client = SandboxClient(slots=1, preload=(), min_isolation=Isolation.L4, skip_plans=confined)
    client.launch()
    with pytest.raises(SandboxDown, match=r"."):
        client.await_hello()
    client.close()


def test_preload_that_does_not_import_is_named() -> None:
    with pytest.raises(SandboxDown, match="no_such_module"):
        SandboxClient.start(slots=1, preload=("no_such_module",))


def test_one_program_can_be_run_without_an_event_loop() -> None:
    response = run_once("print(input())", stdin="hello")
    assert response.stdout == "hello\n"


def test_cpu_of_programs_is_counted(own_client: SandboxClient) -> None:
    before = own_client.cpu_seconds()
    response = asyncio.run(run(own_client, "for n in range(3 * 10**6): pass"))
    assert own_client.cpu_seconds() - before >= response.cpu_seconds > 0


async def test_host_never_loads_torch_and_programs_never_see_it(client: SandboxClient) -> None:
    assert not any("torch" in region.path for region in psutil.Process(client.process.pid).memory_maps())
    assert (await run(client, "import sys\n'torch' in sys.modules")).value == "False"
