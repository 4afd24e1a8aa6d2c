"""Hostile programs that flood, hang on, or leave processes behind."""

from __future__ import annotations

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import attack, promised
from tests.sandbox.support import daemon_process, eventually


async def test_output_flood_is_cut_at_once(client: SandboxClient) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    response = await attack(client, code, output_bytes=100_000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT
    assert len(response.stdout) == 100_000


async def test_flood_by_a_child_is_cut_as_well(client: SandboxClient) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(2, b'x' * 65536)\ntime.sleep(60)"
    assert (await attack(client, code, output_bytes=1000)).outcome is ProgramOutcome.OUTPUT_LIMIT


async def test_endless_loop_that_ignores_signals_is_killed(client: SandboxClient) -> None:
    code = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
print("ignoring")
while True: pass
"""
    response = await attack(client, code, wall_seconds=0.3)
    assert (response.outcome, response.stdout) == (ProgramOutcome.WALL_TIMEOUT, "ignoring\n")


async def test_stopping_oneself_does_not_stop_the_clock(client: SandboxClient) -> None:
    promised(client, "L3")
    response = await attack(client, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_seconds=0.3)
    assert response.outcome is ProgramOutcome.WALL_TIMEOUT


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


async def test_zombies_are_collected(client: SandboxClient) -> None:
    code = "import os\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)\nprint('made')"
    assert (await attack(client, code)).stdout == "made\n"
