"""Slots, keepers and working directories of every plan, without daemon or zygote (`walls_runner`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocstar.sandbox.walls import folders
from rocstar.sandbox.walls.plans import PLANS
from tests.sandbox.support import ended, eventually

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = [plan.name for plan in PLANS]
EVERYTHING = """
import os, socket, sys
home = os.getcwd()
os.makedirs("a/b/c"); open("a/b/c/file", "w").write("left"); open(".hidden", "w").write("left")
os.symlink("/usr", "link"); os.symlink(home, "a/loop"); os.link(".hidden", "a/hard"); os.mkfifo("fifo")
open(b"\\xff\\n", "w").close(); os.mkdir(b"-rf \\xfe"); os.mkdir("shut", 0); os.mkdir("odd", 0o111)
for depth in range(300):
    os.mkdir("x" * 20); os.chdir("x" * 20)
os.chdir(home)
for path, mode in (("a", 0), (".", 0), ("..", 0)):
    try: os.utime(path, (1, 1)); os.chmod(path, mode)
    except PermissionError: pass
"""
LOOK = """
import os, time
state, parent = os.stat("."), os.stat("..")
print([name for name in os.listdir(".") if not os.path.ismount(name)], oct(state.st_mode), state.st_mtime > 1e9)
"""


class Runner:
    """A runner of some programs, and what it said."""

    def __init__(self, plan: str, folder: Path, *programs: str, python: str = sys.executable) -> None:
        command = [python, "-P", "-m", "tests.sandbox.walls_runner", plan, f"{folder}/work/0", *programs]
        site = os.pathsep.join([str(REPOSITORY), *sys.path[1:]])
        environment = {**os.environ, "PYTHONPATH": site}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY)
        self.hello = self.next()
        if self.hello["problem"]:
            self.process.wait()
            pytest.skip(f"{plan} is not to be had here: {self.hello['problem']}")

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def outputs(self) -> list[str]:
        """Of all programs; each was followed by a fresh working directory."""
        said = []
        while message := self.next():
            assert message.get("renewed", True), message
            if "output" in message:
                said.append(message["output"])
        return said

    def wait(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("plan", NAMES)
def test_a_working_directory_is_fresh_whatever_a_program_made_of_it(plan: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    runner = Runner(plan, tmp_path, LOOK, EVERYTHING, LOOK, "open('b', 'w')", LOOK)
    first, _, second, _, third = runner.outputs()
    assert first.startswith("[]")
    assert first == second == third
    runner.wait()
    assert not list(tmp_path.glob("work/*")), "a keeper removes its folder when its slot ends"


@pytest.mark.parametrize("plan", ["root", "user"])
def test_files_are_numbered_from_the_start_and_reading_leaves_no_trace(plan: str, tmp_path: Path) -> None:
    program = """
import os
print(os.stat(".").st_ino, [os.open(name, os.O_CREAT) and os.stat(name).st_ino for name in "abc"])
os.utime("a", (5, 5)); open("a").read(); os.mkdir("d"); os.utime("d", (5, 5)); os.listdir("d")
print(os.stat("a").st_atime, os.stat("d").st_atime)
try: os.open(".", os.O_TMPFILE | os.O_RDWR)
except OSError as error: print(error.errno)
"""
    runner = Runner(plan, tmp_path, program, "for n in range(500): open(str(n), 'w').close()", program)
    first, _, second = runner.outputs()
    assert first == second == "1 [2, 3, 4]\n5.0 5.0\n95\n"
    runner.wait()


@pytest.mark.parametrize("plan", ["confined", "process"])
def test_the_parent_of_a_working_directory_cannot_be_marked(plan: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    program = """
import os
def tried(action):
    try: return action()
    except OSError as error: return type(error).__name__
home = os.getcwd()
print([tried(action) for action in (lambda: os.mkdir("../mark"), lambda: os.rename(home, "../moved"),
    lambda: os.listdir(".."), lambda: os.utime(".."), lambda: os.chmod("..", 0o777))])
"""
    runner = Runner(plan, tmp_path, program)
    assert "None" not in runner.outputs()[0]
    runner.wait()


@pytest.mark.parametrize("plan", NAMES)
@pytest.mark.parametrize("killed", ["keeper", "process"])
def test_slot_and_keeper_end_with_each_other(plan: str, killed: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    runner = Runner(plan, tmp_path, "import time\ntime.sleep(60)")
    keeper, slot = (psutil.Process(runner.hello[name]) for name in ("keeper", "process"))
    assert slot.ppid() == keeper.pid
    psutil.Process(runner.hello[killed]).kill()
    assert eventually(lambda: ended(keeper) and ended(slot))
    runner.wait()


@pytest.mark.parametrize("plan", NAMES)
def test_keeper_and_slot_end_with_their_zygote(plan: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    runner = Runner(plan, tmp_path, "import time\ntime.sleep(60)")
    family = [psutil.Process(runner.hello[name]) for name in ("keeper", "process")]
    runner.process.send_signal(signal.SIGKILL)
    assert eventually(lambda: all(map(ended, family)))
    runner.wait()


@pytest.mark.parametrize("plan", ["root", "user"])
def test_an_interpreter_below_the_working_directory_is_there_for_every_call(plan: str, tmp_path: Path) -> None:
    home = Path(f"/tmp/rocstar-test-{os.getpid()}")
    venv.create(home / "deep/venv", symlinks=True)
    program = f"""
import os, subprocess, sys
print(sys.prefix, os.path.exists(sys.prefix + "/pyvenv.cfg"), sorted(os.listdir("/tmp")), os.listdir({str(home)!r}))
for action in (lambda: open(sys.prefix + "/x", "w"), lambda: os.rename({str(home)!r}, "/tmp/moved"),
               lambda: os.mkdir({str(home)!r} + "/x")):
    try: print(action())
    except OSError as error: print(type(error).__name__)
open("left", "w")
"""
    try:
        runner = Runner(plan, tmp_path, program, program, python=str(home / "deep/venv/bin/python"))
        first, second = runner.outputs()
        runner.wait()
    finally:
        shutil.rmtree(home)
    lines = first.splitlines()
    assert lines[0] == f"{home}/deep/venv True ['{home.name}'] ['deep']"
    assert len(lines) == 4 and set(lines[1:]) <= {"OSError", "PermissionError"}
    assert first == second


def test_emptying_a_folder_never_follows_links_out_of_it(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (inside / "a/b").mkdir(parents=True)
    os.symlink(outside, inside / "a/link")
    os.symlink(outside / "kept", inside / "file-link")
    os.chmod(inside / "a/b", 0)
    folders.empty(str(inside))
    assert list(inside.iterdir()) == []
    assert (outside / "kept").read_text() == "kept"


def test_folders_of_the_living_are_kept_and_of_the_dead_removed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from rocstar.sandbox.walls import folders;"
        "print(folders.make_locked(sys.argv[1]), flush=True); time.sleep(60)"
    )
    owners = []
    for name in ("box-dead", "box-alive"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        owners.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY))
    for owner in owners:
        assert owner.stdout is not None
        assert owner.stdout.readline()
    owners[0].kill()
    owners[0].wait()
    (tmp_path / "box-dead/left/shut").mkdir(parents=True)
    (tmp_path / "box-dead/left").chmod(0)
    (tmp_path / "other").mkdir()
    folders.sweep(tmp_path, "box-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box-alive", "other"]
    for owner in owners:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
