"""The contract of a slot's loop, with a pid namespace and without: what other tests and the attacks do not show."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rocstar.sandbox.call import SandboxDown
from rocstar.sandbox.daemon.main import refuse_old_loop
from rocstar.sandbox.slot import _fork  # type: ignore[attr-defined]
from rocstar.sandbox.slot.zygote import LOOP
from rocstar.sandbox.walls.plans import Inside, Walls
from tests.sandbox.driver import Daemon, ended, eventually


@pytest.fixture(scope="module", params=[0, 2], ids=["private", "without a pid namespace"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(slots=1, skip_plans=request.param) as started:
        assert started.run("1").value == "1"
        yield started


def test_the_cpu_of_threads_counts_as_the_programs(daemon: Daemon) -> None:
    burn = "def burn():\n    while time.process_time() < 0.2: pass"
    code = f"import threading, time\n{burn}\nt = threading.Thread(target=burn)\nt.start()\nt.join()"
    assert daemon.run(code).cpu_seconds >= 0.2


def test_an_untouched_directory_is_kept(daemon: Daemon) -> None:
    def look() -> str | None:
        time.sleep(0.05)  # files are dated by a clock that ticks coarsely, and on a busy machine more so
        return daemon.run("import os\nos.stat('.').st_ctime_ns").value

    seen = [look() for _ in range(5)]
    assert any(earlier == later for earlier, later in pairwise(seen)), seen


def test_a_slot_holds_no_descriptor_of_calls(daemon: Daemon) -> None:
    (slot,) = daemon.slots()
    before = slot.num_fds()
    for _ in range(20):
        daemon.run("1")
    assert (daemon.slots(), slot.num_fds()) == ([slot], before)


def folder_of(daemon: Daemon) -> Path:
    """The working directory of its slot."""
    if daemon.info.isolation == "L3":
        pytest.skip("a file system of its own cannot be made to fail from outside")
    (folder,) = Path(daemon.workdirs).glob("*/run")
    return folder


def test_nothing_is_run_where_files_cannot_be_written(daemon: Daemon) -> None:
    folder_of(daemon).chmod(0o500)
    seen = daemon.run("print(1)", files={"f": b""})
    assert ("could not be written" in seen.stderr, seen.stdout) == (True, ""), seen.stderr
    assert daemon.run("print(1)", files={"f": b""}).stdout == "1\n", "its directory was renewed"


@pytest.mark.parametrize("how", ["it is gone", "that takes longer than the call may"])
def test_a_slot_whose_directory_cannot_be_renewed_ends_and_another_runs_the_next_call(daemon: Daemon, how: str) -> None:
    folder, (slot,) = folder_of(daemon), daemon.slots()
    number = daemon.submit("open('f', 'w').close()\nimport time\ntime.sleep(0.5)")
    assert eventually((folder / "f").exists)
    shutil.rmtree(folder.parent) if how == "it is gone" else daemon.keepers()[0].suspend()
    assert daemon.answer(number).outcome == "ok"
    assert eventually(lambda: ended(slot)) and daemon.run("1").value == "1"


def test_the_loop_refuses_to_run_where_it_would_kill_others() -> None:
    walls = Walls(0, 0, -1, "/", Inside(None, True))
    with pytest.raises(ValueError, match="first process of a pid namespace"):
        _fork.serve(socket.socketpair()[0], walls)


def test_where_the_loop_was_not_compiled_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOOP, None)
    with pytest.raises(SandboxDown, match="install a C compiler and Python's headers, then install rocstar again"):
        refuse_old_loop()


def test_a_loop_that_was_compiled_before_an_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_old_loop()
    monkeypatch.setattr(_fork, "source", _fork.source + 1)
    with pytest.raises(SandboxDown, match=r"was compiled from another version of _fork\.c; install rocstar again"):
        refuse_old_loop()
