"""Programs that aim at the daemon: what it reads of them, and what it keeps of them for the next call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from rocstar.sandbox.call import Call, DaemonSettings, Limits, ProgramOutcome, Response, SandboxDown, SessionLost
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.walls import plans

RENAMED = """
import ctypes, time
for name in (b"\\rThreads: 99", b"x\\x0cThreads: 99", b"\\xc2\\xb2"):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    time.sleep(0.6)
print("done")
"""
OUT_OF_MEMORY = """
import mmap, os, time
for _ in range(6):
    if not os.fork():
        part = mmap.mmap(-1, 60 << 20)
        for at in range(0, 60 << 20, 4096):
            part[at] = 1
        time.sleep(9)
        os._exit(0)
time.sleep(2)
while True:
    os.write(1, b"x" * 65536)
"""
LIFT = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)\n"
BURN_LATER = """
import threading, time
def burn():
    time.sleep(0.2)
    while True: pass
threading.Thread(target=burn, daemon=True).start()
"""


@pytest.fixture(scope="module", params=range(3), ids=[plan.name for plan in plans.PLANS[:3]])
def sandbox(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """One slot, so that a call meets whatever the one before has left."""
    with SandboxClient(DaemonSettings(slots=1, preload=(), skip_plans=request.param)) as client:
        client.launch()
        try:
            client.await_hello()
        except SandboxDown as error:
            pytest.skip(f"{error}")
        yield client


@pytest.fixture(scope="module")
def watched() -> Iterator[SandboxClient]:
    """Where no group counts memory, and the daemon looks at programs."""
    with SandboxClient(DaemonSettings(slots=2, preload=(), groups=False)) as client:
        client.launch()
        client.await_hello()
        yield client


async def run(client: SandboxClient, code: str, **limits: int) -> Response:
    whole = Limits(**{"wall_seconds": 10, "cpu_seconds": 10, **limits})
    return await client.run(Call(id="test", code=code, limits=whole))


async def test_a_name_that_is_no_number_does_not_end_the_daemon(watched: SandboxClient) -> None:
    response = await run(watched, RENAMED)
    assert (response.outcome, response.stdout, response.attempt) == (ProgramOutcome.OK, "done\n", 1), response


async def test_a_cells_name_that_is_no_number_is_not_our_fault(sandbox: SandboxClient) -> None:
    async with sandbox.open_session() as session:
        assert (await session.run(RENAMED)).outcome == ProgramOutcome.OK
        assert (await session.run("time.sleep(0); 1")).value == "1"


async def test_what_ran_out_of_memory_before_another_limit_is_not_told_of_the_next_call(sandbox: SandboxClient) -> None:
    if "no_memory_cgroup" in sandbox.info().failed_probes:
        pytest.skip("no memory groups here")
    response = await run(sandbox, OUT_OF_MEMORY, memory_bytes=64 * 2**20, output_bytes=1000)
    assert response.outcome == ProgramOutcome.OUTPUT_LIMIT, response
    assert (await run(sandbox, "print(1)")).outcome == ProgramOutcome.OK


async def test_slots_whose_numbers_are_used_up_cost_the_next_call_time_only() -> None:
    forking = "import os, time\nif not os.fork():\n    os._exit(0)\ntime.sleep(2)"
    with SandboxClient(DaemonSettings(slots=24, preload=())) as client:
        every = [Call(id=f"{n}", code=forking, limits=Limits(wall_seconds=30)) for n in range(24)]
        await asyncio.gather(*map(client.run, every))
        response = await run(client, "print(1)")
    assert (response.outcome, response.attempt) == (ProgramOutcome.OK, 1), response


async def test_a_cell_cannot_lift_its_limit_of_cpu(watched: SandboxClient) -> None:
    async with watched.open_session(limits=Limits(cpu_seconds=1, wall_seconds=60)) as session:
        response = await session.run(LIFT + "while True: pass")
        assert (response.outcome, response.kill_reason) == (ProgramOutcome.CPU_TIMEOUT, "cpu"), response


async def test_a_thread_between_cells_cannot_lift_its_limit_of_cpu(watched: SandboxClient) -> None:
    async with watched.open_session(limits=Limits(cpu_seconds=1, wall_seconds=5)) as session:
        assert (await session.run(LIFT + BURN_LATER)).outcome == ProgramOutcome.OK
        await asyncio.sleep(15)
        with pytest.raises(SessionLost):
            await session.run("1")


@pytest.mark.parametrize("how", ["import os\nos.close(3)", "import json\njson.dumps = None"])
async def test_a_failing_cell_that_breaks_its_report_is_no_success(sandbox: SandboxClient, how: str) -> None:
    async with sandbox.open_session() as session:
        response = await session.run(f"{how}\n1 / 0")
    assert (response.outcome, response.state_lost) == (ProgramOutcome.EXIT_NONZERO, True), response


async def test_adding_up_many_maps_does_not_hold_up_others(watched: SandboxClient) -> None:
    maps = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
held = b"x" * (80 << 20)
at = libc.mmap(None, 60000 * 4096, 1, 0x22, -1, 0)
for page in range(0, 60000, 2):
    libc.mprotect(at + page * 4096, 4096, 3)
for _ in range(14):
    if not os.fork():
        time.sleep(60)
time.sleep(60)
"""
    many = asyncio.create_task(run(watched, maps, wall_seconds=8, memory_bytes=800 * 2**20))
    await asyncio.sleep(2)
    stalled = 0.0
    begun = time.monotonic()
    while time.monotonic() < begun + 4:
        before = time.monotonic()
        await watched.run(Call(id="short", code="1"))
        stalled += max(0.0, time.monotonic() - before - 0.15)
    await many
    assert stalled < 0.8, stalled
