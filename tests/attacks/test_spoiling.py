"""Hostile programs that spoil their slot."""

from __future__ import annotations

import asyncio

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import attack, promised
from tests.sandbox.support import daemon_process, ended, eventually, run, slot_processes


async def test_slot_that_cannot_be_emptied_is_replaced_and_the_answer_kept(client: SandboxClient) -> None:
    promised(client, "L1", "L2")  # elsewhere a folder without permissions is no obstacle
    response = await attack(client, "import os\nos.mkdir('shut', 0)\nprint('made')")
    assert (response.outcome, response.stdout, response.attempt) == (ProgramOutcome.OK, "made\n", 1)


async def test_a_call_that_waits_behind_one_that_spoils_its_slot_is_served(client: SandboxClient) -> None:
    promised(client, "L1", "L2")
    spoiling, waiting = await asyncio.gather(run(client, "import os\nos.mkdir('shut', 0)\n1"), run(client, "2"))
    assert (spoiling.value, waiting.value, waiting.attempt) == ("1", "2", 1)


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
