"""Starting, draining and dying: nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil

from rocstar.sandbox.service import local
from rocstar.sandbox.service.connection import Address, Connection
from rocstar.sandbox.service.load import PROGRAMS, bench, streamed
from tests.sandbox_service.support import Http, eventually

SMALL = ("--preload", "", "--slots", "2")


async def test_a_drain_answers_every_call_that_was_sent() -> None:
    service = local.start(SMALL)
    address = Address.of(service.url)
    connection = await Connection.open(address)
    batch = asyncio.create_task(streamed(connection, PROGRAMS["W1"], range(300)))
    singles = asyncio.create_task(bench(address, PROGRAMS["W1"], callers=8, calls=100_000))
    await asyncio.sleep(0.5)
    service.process.terminate()
    streamed_calls, single_calls = await batch, await singles
    assert (streamed_calls.right, streamed_calls.wrong, streamed_calls.lost) == (300, [], 0)
    assert single_calls.right > 0
    assert (single_calls.wrong, single_calls.lost) == ([], 0)
    assert await asyncio.to_thread(service.process.wait, 30) == 0


def test_nothing_is_left_of_a_service_that_is_killed_hard() -> None:
    service = local.start(SMALL)
    everyone = psutil.Process(service.process.pid).children(recursive=True)
    service.process.kill()
    service.process.wait()
    assert len(everyone) >= 3
    assert eventually(lambda: not any(process.is_running() for process in everyone), 30)


def test_a_worker_that_dies_is_replaced_and_the_counters_go_on() -> None:
    service = local.start((*SMALL, "--workers", "2"))
    try:
        http = Http(service.url)
        for _ in range(5):
            http.run("1")
        workers = psutil.Process(service.process.pid).children()
        assert len(workers) == 2
        workers[0].kill()
        assert eventually(lambda: len(psutil.Process(service.process.pid).children()) == 2)
        assert eventually(lambda: answers(http))
        assert eventually(lambda: http.get("/status")[1]["processes_ready"] == 2)
        assert http.get("/status")[1]["calls"]["ok"] >= 6
    finally:
        assert service.stop() == 0


def answers(http: Http) -> bool:
    try:
        return bool(http.run("1")["outcome"] == "ok")
    except OSError:  # a connection of the dead worker's
        return False


def test_two_workers_share_slots_and_count_together() -> None:
    with local.local_service(("--preload", "", "--slots", "4", "--workers", "2")) as url:
        tally = asyncio.run(bench(Address.of(url), PROGRAMS["W1"], callers=16, calls=200))
        status = Http(url).get("/status")[1]
    assert (tally.right, tally.wrong, tally.lost) == (200, [], 0)
    assert (status["calls"], status["slots"], status["processes"]) == ({"ok": 200}, 4, 2)


def test_neither_the_service_nor_its_commands_load_torch_or_anything_of_the_trainer() -> None:
    script = (
        "import sys, rocstar.cli, rocstar.sandbox.service.server, rocstar.sandbox.service.supervisor,"
        " rocstar.sandbox.service.bench, rocstar.sandbox.service.hostile\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'numpy', 'mcp')]\n"
        "print(bad + [m for m in sys.modules if m.startswith(('rocstar.train', 'rocstar.learning'))])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_running_service_has_no_torch_in_memory() -> None:
    service = local.start(SMALL)
    try:
        Http(service.url).run("1")
        for process in [psutil.Process(service.process.pid), *psutil.Process(service.process.pid).children()]:
            assert not [part.path for part in process.memory_maps() if "torch" in part.path]
    finally:
        service.stop()


def test_ctrl_c_ends_it_cleanly() -> None:
    service = local.start(SMALL)
    os.kill(service.process.pid, signal.SIGINT)
    assert service.process.wait(30) == 0
