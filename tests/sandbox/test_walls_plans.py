"""Slots, keepers and working directories of every plan, from a zygote and without a daemon."""

from __future__ import annotations

import os
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rocstar.sandbox.walls import folders
from rocstar.sandbox.walls.plans import PLANS
from tests.sandbox.driver import ended, eventually
from tests.sandbox.slots import Slot, Zygote, zygote

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


@pytest.fixture(scope="module")
def source() -> Iterator[Zygote]:
    with zygote() as started:
        yield started


def slot_of(source: Zygote, plan: str) -> Slot:
    slot = source.spawn(NAMES.index(plan))
    if slot.hello["problem"]:
        pytest.skip(f"{plan} is not to be had here: {slot.hello['problem']}")
    return slot


def outputs(slot: Slot, *programs: str) -> list[str]:
    """Of all these; each was followed by a fresh working directory."""
    outcomes = [slot.code(code) for code in programs]
    assert all(outcome.ended.reusable for outcome in outcomes), outcomes
    return [outcome.stdout for outcome in outcomes]


@pytest.mark.parametrize("plan", NAMES)
def test_a_working_directory_is_fresh_whatever_a_program_made_of_it(source: Zygote, plan: str) -> None:
    before = {*Path(source.workdirs).glob("*")}
    slot = slot_of(source, plan)
    first, _, second, _, third = outputs(slot, LOOK, EVERYTHING, LOOK, "open('b', 'w')", LOOK)
    assert first.startswith("[]")
    assert first == second == third
    slot.connection.close()
    assert eventually(lambda: before >= {*Path(source.workdirs).glob("*")}), "a keeper removes its folder at the end"


@pytest.mark.parametrize("plan", ["confined", "process"])
def test_the_parent_of_a_working_directory_cannot_be_marked(source: Zygote, plan: str) -> None:
    program = """
import os
def tried(action):
    try: return action()
    except OSError as error: return type(error).__name__
home = os.getcwd()
print([tried(action) for action in (lambda: os.mkdir("../mark"), lambda: os.rename(home, "../moved"),
    lambda: os.listdir(".."), lambda: os.utime(".."), lambda: os.chmod("..", 0o777))])
"""
    (said,) = outputs(slot_of(source, plan), program)
    assert said and "None" not in said


@pytest.mark.parametrize("plan", NAMES)
def test_slot_and_keeper_end_with_each_other(source: Zygote, plan: str) -> None:
    for killed in ("keeper", "slot"):
        slot = slot_of(source, plan)
        family = [psutil.Process(slot.hello[name]) for name in ("keeper", "slot")]
        assert family[1].ppid() == family[0].pid
        psutil.Process(slot.hello[killed]).kill()
        assert eventually(lambda family=family: all(map(ended, family))), killed


def test_all_slots_and_keepers_end_with_their_zygote() -> None:
    with zygote() as source:
        hellos = [source.spawn(number).hello for number in range(len(PLANS))]
        up = [hello for hello in hellos if not hello["problem"]]
        family = [psutil.Process(hello[name]) for hello in up for name in ("keeper", "slot")]
        assert family
        source.process.kill()
        assert eventually(lambda: all(map(ended, family)))


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
        with zygote() as source:
            first, second = outputs(slot_of(source, plan), program, program)
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


def test_folders_of_the_living_are_kept_and_of_the_dead_removed(tmp_path: Path) -> None:
    dead, alive = (folders.make_locked(tmp_path / name) for name in ("box-dead", "box-alive"))
    os.close(dead)  # as the end of its process does
    (tmp_path / "box-dead/left/shut").mkdir(parents=True)
    (tmp_path / "box-dead/left").chmod(0)
    (tmp_path / "other").mkdir()
    folders.sweep(tmp_path, "box-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box-alive", "other"]
    os.close(alive)
