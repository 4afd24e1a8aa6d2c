"""Hostile programs that flood, hang on, or leave processes behind."""

from __future__ import annotations

import asyncio

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import attack
from tests.sandbox.support import daemon_process, ended, eventually, run, slot_processes


async def test_flood_by_a_child_is_cut_as_well(client: SandboxClient) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(2, b'x' * 65536)\ntime.sleep(60)"
    assert (await attack(client, code, output_bytes=1000)).outcome is ProgramOutcome.OUTPUT_LIMIT


async def test_exit_hooks_and_threads_that_never_end_are_killed(client: SandboxClient) -> None:
    for code in (
        "import atexit, time\natexit.register(time.sleep, 60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    ):
        assert (await attack(client, code, wall_seconds=0.15)).outcome is ProgramOutcome.WALL_TIMEOUT


async def test_daemonised_grandchild_dies_with_the_call(client: SandboxClient) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("left")
"""
    daemon = daemon_process(client)
    before = len(daemon.children(recursive=True))
    response = await attack(client, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "left\n")
    assert eventually(lambda: len(daemon.children(recursive=True)) == before)


async def test_what_a_program_started_dies_even_when_its_slot_is_killed(client: SandboxClient) -> None:
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        break
time.sleep(60)
"""
    daemon = daemon_process(client)
    before = len(daemon.children(recursive=True))
    task = asyncio.ensure_future(run(client, code, wall_seconds=20.0))
    assert await asyncio.to_thread(eventually, lambda: len(daemon.children(recursive=True)) == before + 4)
    family = daemon.children(recursive=True)[-4:]
    task.cancel()
    slot_processes(client)[0].kill()
    assert await asyncio.to_thread(eventually, lambda: all(map(ended, family)))
    await asyncio.gather(task, return_exceptions=True)
    assert (await run(client, "1")).value == "1"


async def test_process_tricks_outlive_nothing(client: SandboxClient) -> None:
    code = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(4, 1)   # dumpable
libc.prctl(1, 0)   # no signal when the parent dies
libc.prctl(36, 1)  # adopts orphans
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("left")
os._exit(0)
"""
    daemon = daemon_process(client)
    await run(client, "1")  # its slot is up, and nothing of earlier calls is left
    before = len(daemon.children(recursive=True))
    assert (await attack(client, code)).stdout == "left\n"
    assert await asyncio.to_thread(eventually, lambda: len(daemon.children(recursive=True)) == before)
