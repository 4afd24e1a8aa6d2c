"""One writer for each run folder."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from rocstar.errors import ConfigError
from rocstar.record.lock import LOCK
from tests.forks import once_it_speaks
from tests.record.examples import run
from tests.tiny_run import PYTHON

HOLD = """\
import os, subprocess, sys, time
from rocstar.record.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
"""
WAIT = "    print('held', flush=True); time.sleep(60)"
WAIT_WITH_CHILD = (
    "    child = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)\n"
    "    print(child.pid, flush=True); time.sleep(60)"
)
WAIT_WITH_FORK = "    child = os.fork() or time.sleep(60)\n    print(child, flush=True); time.sleep(60)"


def test_a_second_writer_is_told_who_holds_the_run_and_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    folder = run(tmp_path)
    holder, _ = once_it_speaks(PYTHON, "-c", HOLD + WAIT, str(folder.path), folder=tmp_path)
    with pytest.raises(ConfigError) as refused, folder.locked():
        pass
    assert f"run tiny is being written by process {holder.pid} on {os.uname().nodename} since 2" in str(refused.value)
    assert "stop it first" in str(refused.value) and "\n" not in str(refused.value)
    holder.kill()
    holder.join()
    with folder.locked():
        assert json.loads((folder.path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("wait", [WAIT_WITH_CHILD, WAIT_WITH_FORK], ids=["program", "fork"])
def test_a_child_that_outlives_the_holder_does_not_hold_the_lock_on(tmp_path: Path, wait: str) -> None:
    folder = run(tmp_path)
    holder, child = once_it_speaks(PYTHON, "-c", HOLD + wait, str(folder.path), folder=tmp_path)
    holder.kill()
    holder.join()
    try:
        with folder.locked():
            pass
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize(
    ("error", "users", "told"),
    [
        (PermissionError(errno.EACCES, "no"), 1, f"is of user {os.getuid()}, who alone may write in"),
        (PermissionError(errno.EACCES, "no"), 0, r"is read-only \(no\) in"),
        (OSError(errno.EROFS, "a medium"), 1, r"is read-only \(a medium\) in"),
    ],
    ids=["another user's", "one's own folder", "a file system"],
)
def test_a_run_that_may_not_be_written_is_told_with_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, users: int, told: str
) -> None:
    folder = run(tmp_path)
    monkeypatch.setattr("os.open", Mock(side_effect=error))  # root, as whom tests may run, may write all
    monkeypatch.setattr("os.geteuid", Mock(return_value=os.getuid() + users))
    with pytest.raises(ConfigError, match=f"{told} .*; .*: rocstar train --branch {folder.path}$"), folder.locked():
        pass


def test_the_lock_is_let_go_at_the_end_and_by_an_error(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with pytest.raises(KeyError), folder.locked():
        raise KeyError
    with folder.locked():
        pass
