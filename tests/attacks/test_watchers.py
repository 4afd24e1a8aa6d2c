"""Programs that aim at the daemon: what it reads of them, and what it keeps of them for the next call."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.daemon.queue import MAX_MOVES
from tests.attacks.support import attack, promised
from tests.sandbox.driver import Daemon, eventually

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
        part = mmap.mmap(-1, 60 << 20, flags=mmap.MAP_PRIVATE)
        for at in range(0, 60 << 20, 4096):
            part[at] = 1
        time.sleep(60)
os.wait()
while True:
    os.write(1, b"x" * 65536)
"""
TABLES = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for _ in range(2):
    if not os.fork():
        for n in range(1024, 22_000):  # each page alone in its table, and that in its own
            ctypes.c_char.from_address(libc.mmap(ctypes.c_void_p(n << 30), 4096, 1, 0x100022, -1, 0)).value
        time.sleep(60)
time.sleep(60)
"""
LIFT = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)\n"
BURN_LATER = """
import threading, time
def burn():
    time.sleep(0.2)
    while True: pass
threading.Thread(target=burn, daemon=True).start()
"""


@pytest.fixture(scope="module")
def watched() -> Iterator[Daemon]:
    """Where no group counts memory, and the daemon looks at programs."""
    with Daemon(groups=False) as started:
        yield started


def test_a_name_that_is_no_number_does_not_end_the_daemon(watched: Daemon) -> None:
    assert attack(watched, RENAMED).stdout == "done\n"


def test_a_cells_name_that_is_no_number_is_not_our_fault(daemon: Daemon) -> None:
    assert daemon.cell("renamed", 1, RENAMED).outcome is ProgramOutcome.OK
    assert daemon.cell("renamed", 2, "1").value == "1"
    daemon.end("renamed")


def test_a_call_is_watched_where_no_group_counts_it(watched: Daemon) -> None:
    response = attack(watched, OUT_OF_MEMORY, memory_bytes=64 * 2**20)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")


def test_tables_of_pages_are_memory_of_a_call(watched: Daemon) -> None:
    response = attack(watched, TABLES, memory_bytes=96 * 2**20)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.MEMORY, "memory")


def test_what_ran_out_of_memory_before_another_limit_is_not_told_of_the_next_call(daemon: Daemon) -> None:
    promised(daemon, "L1", "L2", "L3", without="no_memory_cgroup")
    response = attack(daemon, OUT_OF_MEMORY, memory_bytes=64 * 2**20, output_bytes=1000)
    assert response.outcome is ProgramOutcome.OUTPUT_LIMIT, response


def test_slots_whose_numbers_are_used_up_cost_the_next_call_time_only() -> None:
    slots = MAX_MOVES + 2
    with Daemon(slots=slots) as daemon:
        code = "import os, time\nif not os.fork():\n    os._exit(0)\ntime.sleep(1)"
        numbers = [daemon.submit(code) for _ in range(slots)]
        assert {daemon.answer(number).outcome for number in numbers} == {ProgramOutcome.OK}
        assert daemon.run("1").value == "1"


def test_a_cell_cannot_lift_its_limit_of_cpu(watched: Daemon) -> None:
    response = watched.cell("lifted", 1, LIFT + "while True: pass", cpu_seconds=1.0)
    assert (response.outcome, response.kill_reason) == (ProgramOutcome.CPU_TIMEOUT, "cpu"), response
    watched.end("lifted")


def test_a_thread_between_cells_cannot_lift_its_limit_of_cpu(watched: Daemon) -> None:
    limits = {"cpu_seconds": 1.0, "wall_seconds": 5.0}
    before = set(watched.below())
    assert watched.cell("thread", 1, LIFT + BURN_LATER, **limits).outcome is ProgramOutcome.OK
    (notebook,) = (process for process in set(watched.below()) - before if process in watched.programs())
    assert eventually(lambda: notebook.status() == psutil.STATUS_STOPPED)
    spent = notebook.cpu_times()
    assert spent.user + spent.system < 3.0  # a second between cells, and what it takes to see that
    assert watched.cell("thread", 2, "1", **limits).value == "1"
    watched.end("thread")


@pytest.mark.parametrize("how", ["import os\nos.close(3)", "import json\njson.dumps = None"])
def test_a_failing_cell_that_breaks_its_report_is_no_success(daemon: Daemon, how: str) -> None:
    response = daemon.cell(how, 1, f"{how}\n1 / 0")
    assert (response.outcome, response.state_lost) == (ProgramOutcome.EXIT_NONZERO, True), response


def test_adding_up_many_maps_does_not_hold_up_others(watched: Daemon) -> None:
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
"""
    many, served = watched.begin(maps, wall_seconds=60.0, memory_bytes=800 * 2**20), 0
    while (spent := beside_the_loop(watched)) < 0.5 and served < 2000:
        assert watched.run("1").value == "1"
        served += 1
    watched.cancel(many)
    assert spent >= 0.5 and served > 10, f"{served} calls while it took {spent} s of CPU to add up"


def beside_the_loop(daemon: Daemon) -> float:
    """CPU seconds of the daemon's threads but the first, in which its loop runs."""
    pid = daemon.process.pid
    return sum(one.user_time + one.system_time for one in psutil.Process(pid).threads() if one.id != pid)
