"""Slots, keepers and working directories of every plan."""

from __future__ import annotations

import os
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox.walls import folders
from rocstar.sandbox.walls.plans import PLANS
from tests.sandbox.driver import Daemon, daemon_of, ended, eventually

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


@pytest.fixture(scope="module", params=[plan.name for plan in PLANS])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with daemon_of(request.param, slots=1) as started:
        yield started


def test_a_working_directory_is_fresh_whatever_a_program_made_of_it(daemon: Daemon) -> None:
    first, slots = daemon.run(LOOK).stdout, daemon.slots()
    assert first.startswith("[]")
    for made in (EVERYTHING, "open('b', 'w')"):
        daemon.run(made)
        assert daemon.run(LOOK).stdout == first
    assert daemon.slots() == slots, "one slot has run them all"


def test_slot_and_keeper_end_with_each_other_and_with_their_zygote(daemon: Daemon) -> None:
    for killed in (Daemon.slots, Daemon.keepers, Daemon.zygotes):
        assert daemon.run("1").value == "1"
        family = [*daemon.slots(), *daemon.keepers()]
        killed(daemon)[0].kill()
        assert eventually(lambda family=family: all(map(ended, family))), killed


def test_the_parent_of_a_working_directory_cannot_be_marked(daemon: Daemon) -> None:
    if daemon.info.isolation == "L3":
        pytest.skip("it is of the call's own file system")
    program = """
import os
def tried(action):
    try: return action()
    except OSError as error: return type(error).__name__
home = os.getcwd()
print([tried(action) for action in (lambda: os.mkdir("../mark"), lambda: os.rename(home, "../moved"),
    lambda: os.listdir(".."), lambda: os.utime(".."), lambda: os.chmod("..", 0o777))])
"""
    said = daemon.run(program).stdout
    assert said and "None" not in said


@pytest.mark.parametrize("plan", ["root", "user"])
def test_an_interpreter_below_the_working_directory_is_there_for_every_call(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(f"/tmp/rocstar-test-{os.getpid()}")
    venv.create(home / "deep/venv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(home / "deep/venv/bin/python"))
    program = f"""
import os, sys, tempfile
print(sys.prefix, os.path.exists(sys.prefix + "/pyvenv.cfg"), sorted(os.listdir("/tmp")), os.listdir({str(home)!r}))
print(tempfile.gettempdir(), os.getcwd(), os.environ["HOME"], os.listdir("."))
for action in (lambda: open(sys.prefix + "/x", "w"), lambda: os.rename({str(home)!r}, "/tmp/moved"),
               lambda: os.mkdir({str(home)!r} + "/x")):
    try: print(action())
    except OSError as error: print(type(error).__name__)
open("left", "w")
"""
    try:
        with daemon_of(plan, slots=1) as daemon:
            first, second = (daemon.run(program).stdout for _ in range(2))
    finally:
        shutil.rmtree(home)
    lines = first.splitlines()
    assert lines[0] == f"{home}/deep/venv True ['{home.name}'] ['deep']"
    assert lines[1] == "/mnt /mnt /mnt []"
    assert len(lines) == 5 and set(lines[2:]) <= {"OSError", "PermissionError"}
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


def test_a_link_that_takes_the_place_of_a_folder_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, precious = os.rename, tmp_path / "outside/precious"
    precious.mkdir(parents=True)
    (tmp_path / "inside/folder").mkdir(parents=True)

    def swapped(source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        move(source, tmp_path / "aside", src_dir_fd=src_dir_fd)
        os.symlink(tmp_path / "outside", source, dir_fd=src_dir_fd)
        move(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", swapped)
    with pytest.raises(OSError):
        folders.empty(str(tmp_path / "inside"))
    monkeypatch.undo()
    folders.empty(str(tmp_path / "inside"))
    assert precious.exists() and not list((tmp_path / "inside").iterdir())


def test_folders_of_the_living_are_kept_and_of_the_dead_removed(tmp_path: Path) -> None:
    dead, alive = (folders.make_locked(tmp_path / name) for name in ("box-dead", "box-alive"))
    os.close(dead)  # as the end of its process does
    (tmp_path / "box-dead/left/shut").mkdir(parents=True)
    (tmp_path / "box-dead/left").chmod(0)
    (tmp_path / "other").mkdir()
    folders.sweep(tmp_path, "box-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box-alive", "other"]
    os.close(alive)
