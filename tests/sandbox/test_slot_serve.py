"""The contract of a slot's loop, with a pid namespace and without: what other tests and the attacks do not show."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rocstar.sandbox.slot import _fork  # type: ignore[attr-defined]
from rocstar.sandbox.slot.zygote import LOOP, load
from rocstar.sandbox.walls.plans import Inside, Walls
from tests.sandbox.slots import Slot, Zygote, zygote

LOOPS = {"private": (0, 1), "without a pid namespace": (2, 3)}
"""The plans under which it runs."""
FORK = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()"


@pytest.fixture(scope="module", params=LOOPS)
def source(request: pytest.FixtureRequest) -> Iterator[tuple[Zygote, tuple[int, ...]]]:
    with zygote() as started:
        yield started, LOOPS[request.param]


@pytest.fixture
def slot(source: tuple[Zygote, tuple[int, ...]]) -> Iterator[Slot]:
    started, plans = source
    for slot in map(started.spawn, plans):
        if not slot.hello["problem"]:
            yield slot
            return
    pytest.skip("its plans are not to be had here")


@pytest.fixture
def private(slot: Slot, request: pytest.FixtureRequest) -> Slot:
    """One with a pid namespace."""
    if "without" in request.node.name:
        pytest.skip("numbers of processes are those of the machine")
    return slot


def test_the_cpu_of_threads_counts_as_the_processs_own(slot: Slot) -> None:
    burn = "def burn():\n    while time.process_time() < 0.2: pass"
    ended = slot.code(f"import threading, time\n{burn}\nt = threading.Thread(target=burn)\nt.start()\nt.join()").ended
    assert min(ended.slot_cpu_seconds, ended.cpu_seconds, ended.own_cpu_seconds) >= 0.2


def test_an_untouched_directory_is_kept(slot: Slot) -> None:
    def look() -> str:
        time.sleep(
            0.05
        )  # files are dated by a clock that ticks coarsely; on a busy machine it may stand still for longer
        return slot.code("import os\nprint(os.stat('.').st_ctime_ns, os.path.exists('f'))").stdout

    seen = [look() for _ in range(5)]
    assert any(earlier == later for earlier, later in pairwise(seen)), seen


def test_a_slot_whose_directory_cannot_be_renewed_says_so_and_exits(
    slot: Slot, source: tuple[Zygote, tuple[int, ...]]
) -> None:
    folders = list(Path(source[0].workdirs).glob("*/run"))
    if not folders:
        pytest.skip("a file system of its own cannot be made to fail from outside")
    slot.begin("open('f', 'w').close()\nimport time\ntime.sleep(0.5)")
    for folder in folders:
        shutil.rmtree(folder.parent)
    assert not slot.ended().reusable
    assert slot.is_closed()


def test_a_program_that_has_started_processes_makes_the_next_call_stale(private: Slot) -> None:
    assert private.code(FORK).ended.reusable
    outcome = private.code("print('run')")
    assert outcome.ended.stale and not outcome.ended.reusable
    assert outcome.stdout == ""
    assert private.is_closed()


@pytest.mark.parametrize("given", [{"big": bytes(65 * 2**20)}, {"x" * 300: b""}, {"a": b"", "a/b": b""}, {"a\0b": b""}])
def test_nothing_is_run_where_files_cannot_be_written(slot: Slot, given: dict[str, bytes]) -> None:
    seen = slot.code("print(1)", files=given)
    assert "could not be written" in seen.stderr
    assert (seen.stdout, seen.ended.wait_status) == ("", 1 << 8)


def test_it_ends_with_its_channel_and_holds_no_descriptor_of_calls(slot: Slot) -> None:
    held = f"/proc/{slot.hello['slot']}/fd"
    slot.code("1")
    before = len(os.listdir(held))
    for _ in range(20):
        slot.code("1")
    assert len(os.listdir(held)) == before
    slot.connection.shutdown(socket.SHUT_WR)
    assert slot.is_closed()


def test_the_loop_refuses_to_run_where_it_would_kill_others() -> None:
    walls = Walls(0, 0, -1, "/", Inside(None, True))
    with pytest.raises(ValueError, match="first process of a pid namespace"):
        _fork.serve(socket.socketpair()[0], walls)


def test_where_the_loop_was_not_compiled_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOOP, None)
    assert "install a C compiler and Python's headers, then install rocstar again" in load(())


def test_a_loop_that_was_compiled_before_an_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(()) == ""
    monkeypatch.setattr(_fork, "source", _fork.source + 1)
    assert load(()).endswith("was compiled from another version of _fork.c; install rocstar again")
