"""Hostile programs that want to learn something: secrets, other processes, the call before."""

from __future__ import annotations

import os

import pytest

from rocstar.sandbox.slot.channel import CONTROL
from tests.attacks.support import REPOSITORY, attack, names, promised
from tests.sandbox.driver import Daemon


def test_environment_of_the_trainer_is_not_there(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    response = attack(daemon, "import os\nsorted(os.environ)")
    assert response.value is not None
    names = set(eval(response.value))
    assert names <= {"HOME", "PATH", "LANG", "TMPDIR", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


def test_processes_outside_cannot_be_read(daemon: Daemon) -> None:
    promised(daemon, "L2", "L3")
    paths = [f"/proc/{pid}/{name}" for pid in ("1", os.getpid(), "self") for name in ("environ", "maps", "mem")]
    found = names(daemon, *(f"open({path!r}, 'rb').read(1)" for path in paths))
    assert set(found) <= {"FileNotFoundError", "PermissionError"}


def test_files_outside_cannot_be_read(daemon: Daemon) -> None:
    promised(daemon, "L2", "L3")
    paths = ["/etc/shadow", "/etc/hosts", str(REPOSITORY / "pyproject.toml"), str(REPOSITORY / "rocstar/errors.py")]
    found = names(daemon, *(f"open({path!r}).read()" for path in paths))
    assert set(found) <= {"FileNotFoundError", "PermissionError"}


def test_only_the_interpreter_and_the_libraries_are_there(daemon: Daemon) -> None:
    promised(daemon, "L3")
    response = attack(daemon, "import os\nsorted(os.listdir('/')), os.path.exists('/proc/self')")
    assert response.value is not None
    folders, proc = eval(response.value)
    assert not {"proc", "sys", "home", "var", "run", "boot", "srv"} & set(folders)
    assert proc is False


def test_standard_streams_and_its_report_are_the_only_descriptors(daemon: Daemon) -> None:
    code = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
print([fd for fd in range(1024) if is_open(fd)])
"""
    assert attack(daemon, code).stdout == f"{[0, 1, 2, CONTROL]}\n"


def test_random_numbers_differ_from_call_to_call(daemon: Daemon) -> None:
    code = "import os, random, uuid\n(random.random(), os.urandom(8), uuid.uuid4())"
    first, second = daemon.run(code, seed=1), daemon.run(code, seed=2)
    assert first.value is not None and second.value is not None
    assert first.value != second.value
