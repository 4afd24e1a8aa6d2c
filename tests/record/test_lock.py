"""One writer for each run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.record.lock import LOCK
from tests.record.examples import run

HOLD = "import sys, time; from rocstar.record.folder import RunFolder\nwith RunFolder(sys.argv[1]).locked():\n"


def holder(folder: RunFolder, then: str = "    print('held', flush=True); time.sleep(60)") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + then, str(folder.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_told_who_holds_the_run_and_since_when(tmp_path: Path) -> None:
    folder = run(tmp_path)
    process = holder(folder)
    try:
        with pytest.raises(ConfigError) as refused, folder.locked():
            pass
    finally:
        process.kill()
        process.communicate()
    assert f"run tiny is being written by process {process.pid} on {os.uname().nodename} since 2" in str(refused.value)
    assert "stop it first" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_is_free(tmp_path: Path, end: signal.Signals) -> None:
    folder = run(tmp_path)
    process = holder(folder)
    process.send_signal(end)
    process.communicate()
    with folder.locked():
        assert json.loads((folder.path / LOCK).read_text())["pid"] == os.getpid()


def test_a_program_that_outlives_the_holder_does_not_hold_the_lock_on(tmp_path: Path) -> None:
    folder = run(tmp_path)
    process = holder(
        folder,
        "    import subprocess; c = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)\n"
        "    print('held', flush=True); print(c.pid, flush=True); time.sleep(60)",
    )
    assert process.stdout is not None
    sleeper = int(process.stdout.readline())
    process.kill()
    process.communicate()
    try:
        with folder.locked():
            pass
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_the_lock_is_let_go_at_the_end_and_by_an_error(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with pytest.raises(KeyError), folder.locked():
        raise KeyError
    with folder.locked():
        pass
