"""Hostile programs that flood, hang on, or leave processes behind."""

from __future__ import annotations

import pytest

from rocstar.sandbox.call import ProgramOutcome
from tests.attacks.support import attack
from tests.sandbox.driver import Daemon, ended, eventually


def test_flood_by_a_child_is_cut_as_well(daemon: Daemon) -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: os.write(2, b'x' * 65536)\ntime.sleep(60)"
    assert attack(daemon, code, output_bytes=1000).outcome is ProgramOutcome.OUTPUT_LIMIT


def test_exit_hooks_and_threads_that_never_end_are_killed(daemon: Daemon) -> None:
    for code in (
        "import atexit, time\natexit.register(time.sleep, 60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    ):
        assert attack(daemon, code, wall_seconds=0.15).outcome is ProgramOutcome.WALL_TIMEOUT


LEFT = {
    "daemonised grandchild": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
os.wait()
print("left")
""",
    "process tricks": """
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
print("left", flush=True)
os._exit(0)
""",
}


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_what_is_left_running_dies_with_the_call(daemon: Daemon, code: str) -> None:
    daemon.run("1")  # its slot is up, and nothing of earlier calls is left
    before = len(daemon.below())
    response = attack(daemon, code)
    assert (response.outcome, response.stdout) == (ProgramOutcome.OK, "left\n")
    assert eventually(lambda: len(daemon.below()) == before)


def test_what_a_program_started_dies_even_when_its_slot_is_killed(daemon: Daemon) -> None:
    before = set(daemon.below())
    daemon.begin("import os\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        break")
    assert eventually(lambda: len(set(daemon.below()) - before) == 4)
    family = set(daemon.below()) - before
    daemon.slots()[0].kill()
    assert eventually(lambda: all(map(ended, family)))
    assert daemon.run("1").value == "1"
