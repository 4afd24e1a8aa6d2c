"""A program that failed because the machine or its container ran out of something was not the one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rocstar.sandbox import container
from rocstar.sandbox.call import ProgramOutcome, Response
from rocstar.sandbox.daemon import watch
from rocstar.sandbox.daemon.watch import Shortages
from tests.sandbox.driver import Daemon, eventually, group_of

KILLED = Response(id="1", outcome=ProgramOutcome.SIGNAL, signal="SIGKILL")
RAISED = Response(id="1", outcome=ProgramOutcome.EXCEPTION)
TAKES_150_MIB = "block = bytearray(150 << 20)\nfor at in range(0, len(block), 4096): block[at] = 1"
EXCEEDS_ITS_LIMIT = """
import os, time
for _ in range(12):
    if not os.fork():
        block = os.urandom(40 << 20)
        time.sleep(20)
time.sleep(20)
"""
STARTS_ANOTHER = "import subprocess\nsubprocess.run(['true'])"


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    counts = {"kills": 5, "refused_processes": 7}
    for name in counts:
        monkeypatch.setattr(container, name, lambda name=name: counts[name])

    def happen(name: str) -> None:
        counts[name] += 1

    return happen


@pytest.mark.parametrize(
    ("response", "event", "word"),
    [(KILLED, "kills", "out of memory"), (RAISED, "refused_processes", "pids.max")],
)
def test_a_failure_is_blamed_on_what_ran_out_since_it_began(
    happens: Callable[[str], None], response: Response, event: str, word: str
) -> None:
    shortages = Shortages()
    before = shortages.counts
    assert shortages.blamed(response, before, "", lost=True) == ""
    happens(event)
    assert all(word in shortages.blamed(response, before, "", lost=True) for _ in range(2))
    assert shortages.blamed(response, shortages.counts, "", lost=True) == ""


@pytest.mark.parametrize(
    "response",
    [
        Response(id="1", outcome=ProgramOutcome.OK),
        Response(id="1", outcome=ProgramOutcome.MEMORY, signal="SIGKILL", kill_reason="memory"),
        Response(id="1", outcome=ProgramOutcome.WALL_TIMEOUT, kill_reason="wall"),
        Response(id="1", outcome=ProgramOutcome.SIGNAL, signal="SIGSEGV"),
    ],
)
def test_what_kept_no_limit_of_its_own_or_did_not_fail_is_blamed_on_nothing(
    happens: Callable[[str], None], response: Response
) -> None:
    shortages = Shortages()
    before = shortages.counts
    happens("kills")
    happens("refused_processes")
    assert shortages.blamed(response, before, "", lost=True) == ""


def test_a_program_that_the_container_has_no_memory_for_is_a_fault_of_the_service() -> None:
    """Its own limit is far away. In the next call it kills itself, which is its own doing."""
    limits = {"memory_limit_in_bytes": f"{100 << 20}", "memory_max": f"{100 << 20}"}
    with group_of("memory", **limits) as folder, Daemon(slots=1, groups=False) as daemon:
        (folder / "cgroup.procs").write_text(f"{daemon.slots()[0].pid}")
        told = daemon.run(TAKES_150_MIB, memory_bytes=512 << 20)
        assert (told.outcome, "out of memory" in told.message) == ("internal", True), told
        told = daemon.run("import os; os.kill(os.getpid(), 9)")
        assert (told.outcome, told.signal) == ("signal", "SIGKILL"), told


def test_a_program_that_kills_itself_while_another_exceeds_its_own_limit_is_not_excused() -> None:
    """Else an attempt could leave its group: by two calls in one turn."""
    with Daemon(slots=2) as daemon:
        if "no_memory_cgroup" in daemon.info.failed_probes:
            pytest.skip("no control group of memory can be made here")
        number, before = daemon.begin(), container.kills()
        (program,) = daemon.programs()
        other = daemon.submit(EXCEEDS_ITS_LIMIT, memory_bytes=64 << 20)
        assert eventually(lambda: container.kills() > before)
        program.kill()  # as it may do itself
        told = daemon.answer(number)
        assert (told.outcome, told.signal) == ("signal", "SIGKILL"), told
        daemon.cancel(other)


def test_a_program_that_the_container_has_no_process_for_is_a_fault_of_the_service() -> None:
    with group_of("pids") as folder, Daemon(slots=1, groups=False) as daemon:
        assert daemon.run(STARTS_ANOTHER).outcome == "ok"
        family = [psutil.Process(daemon.process.pid), *daemon.below()]
        for process in family:
            (folder / "cgroup.procs").write_text(f"{process.pid}")
        full = int((folder / "pids.current").read_text()) + 1
        (folder / "pids.max").write_text(f"{full}")  # room for the program alone
        told = daemon.run(STARTS_ANOTHER)
        assert (told.outcome, "pids.max" in told.message) == ("internal", True), told
        (folder / "pids.max").write_text("max")
        assert eventually(lambda: daemon.run(STARTS_ANOTHER).outcome == "ok")


async def test_a_look_for_which_there_is_no_thread_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | Exception] = [RuntimeError("can't start new thread"), "memory"]
    passed = asyncio.get_running_loop().create_future()

    async def to_thread(look: Any, worker: Any) -> str:
        answer = answers.pop(0) if answers else ""
        if isinstance(answer, Exception):
            raise answer
        return answer

    worker: Any = SimpleNamespace(watched={"no_memory_cgroup"}, started=0.0, on_exceeded=passed.set_result)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    watching = asyncio.create_task(watch.watch(lambda: [worker], ()))
    await asyncio.wait((watching, passed), return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    assert passed.result() == "memory"
