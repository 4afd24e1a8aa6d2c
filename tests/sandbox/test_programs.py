"""Which tier a program starts from, what it sees, what its process reports, and the files that go in and out."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox.call import MAX_OUTPUT_BYTES, Failure
from rocstar.sandbox.daemon.pool import BARE, Tier, chooser, offered_tiers
from rocstar.sandbox.slot import channel
from tests.sandbox.driver import Daemon, needs_empty_folder


@pytest.fixture(scope="module")
def bare() -> Iterator[Daemon]:
    with Daemon(slots=1) as started:
        yield started


# Output, value, exit


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("x = 3\nx", "3"),
        ("None", None),
        ("x = 3", None),
        ("x = 3\nx;", None),
        ("x = 3; x", "3"),
        ("(1,\n2)", "(1, 2)"),
        ("if True:\n    7", None),
        ("if True:\r    x = 7\rx", "7"),
        ("x = 1 + \\\n2", None),
        ("5  # a comment; with a semicolon", "5"),
        ("5\n# a comment after it\n\n", "5"),
        ("from __future__ import annotations\ndef f(a: nothing): ...\nf.__annotations__", "{'a': 'nothing'}"),
        ("'''a\nb'''", "'a\\nb'"),
        ("", None),
    ],
)
def test_value_is_that_of_a_last_expression_as_ipython_shows_it(bare: Daemon, code: str, value: str | None) -> None:
    seen = bare.run(code)
    assert (seen.exit_code, seen.value) == (0, value), seen.stderr


def test_lone_surrogates_are_bytes_that_are_no_text(bare: Daemon) -> None:
    assert bare.run("print('\\ud800')").stdout == "\ufffd\ufffd\ufffd\n"
    assert bare.run("raise ValueError('\\ud800')").exception == Failure(type="ValueError", message="?", line=1)


# Failures


def test_traceback_shows_only_lines_of_the_program(bare: Daemon) -> None:
    seen = bare.run("import json\ndef f(text):\n    return json.loads(text)\nprint('before')\nf('{')")
    assert seen.stdout == "before\n"
    told = [line for line in seen.stderr.splitlines() if line.strip("~^ ")]  # marks, by the version of Python
    assert told[1:5] == [
        '  File "<program>", line 5, in <module>',
        "    f('{')",
        '  File "<program>", line 3, in f',
        "    return json.loads(text)",
    ]
    assert seen.stderr.count("File ") == 2
    assert seen.exception is not None
    assert (seen.exception.type, seen.exception.line) == ("json.decoder.JSONDecodeError", 3)


@pytest.mark.parametrize("made", ["multiprocessing.Pool(1)", "concurrent.futures.ProcessPoolExecutor(1)"])
def test_processes_share_the_work_of_a_program_without_a_method_being_named(bare: Daemon, made: str) -> None:
    code = f"""
import concurrent.futures, multiprocessing
def f(x): return 2 * x
with {made} as p: print(*p.map(f, [3]))
"""
    seen = bare.run(code, processes=8, wall_seconds=10.0)
    assert (seen.outcome, seen.stdout) == ("ok", "6\n"), seen


def test_syntax_error_names_its_line(bare: Daemon) -> None:
    seen = bare.run("x = 1\ny = = 2\n")
    assert seen.exception == Failure(type="SyntaxError", message="invalid syntax (<program>, line 2)", line=2)
    assert "y = = 2" in seen.stderr


def test_what_an_exception_tells_is_bounded(bare: Daemon) -> None:
    seen = bare.run("raise type('E' * 10**6, (Exception,), {})('m' * 10**6)", output_bytes=MAX_OUTPUT_BYTES)
    assert seen.exception == Failure(type="E" * 500, message="m" * 2000, line=1)


def test_groups_and_causes_are_shown_with_the_programs_lines(bare: Daemon) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ExceptionGroup('g', [ValueError('v')]) from e"
    seen = bare.run(code)
    assert "line 2, in <module>" in seen.stderr and "ValueError: v" in seen.stderr


# What it starts with


def test_stdin_is_delivered_whole_and_then_ends(bare: Daemon) -> None:
    text = "ä line\n" * 200_000
    code = "import sys\nprint(input(), len(sys.stdin.read()))\nprint(repr(sys.stdin.read()))"
    assert bare.run(code, stdin=text).stdout == f"ä line {len(text) - 7}\n''\n"
    assert bare.run("print(1)", stdin="x" * 2_000_000).stdout == "1\n"


@needs_empty_folder
def test_it_is_main_in_an_empty_folder_with_a_clean_environment(bare: Daemon) -> None:
    code = """
import os, signal, sys
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert os.listdir(".") == [] and sys.argv == ["-c"] or sys.argv == [""], sys.argv
assert os.environ["HOME"] == os.getcwd() and "LD_BIND_NOW" not in os.environ, os.environ
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""
    assert bare.run(code).stderr == ""


def test_threads_and_exit_hooks_finish_before_the_call_does(bare: Daemon) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "hook")
def late():
    time.sleep(0.05)
    print("thread")
threading.Thread(target=late).start()
print("main")
"""
    assert bare.run(code).stdout == "main\nthread\nhook\n"


@pytest.mark.parametrize("lines", ["", "def f(): return kept", "raise ValueError"])
def test_files_left_open_are_written_out_and_what_is_left_is_finalized(bare: Daemon, lines: str) -> None:
    code = f"""
import atexit
class Kept:
    def __del__(self):
        print("deleted", helper())
def helper(): return 1
atexit.register(print, "hook")
kept, file = Kept(), open("left", "w")
file.write("text")
{lines}
"""
    seen = bare.run(code, fetch=("left",))
    assert (seen.stdout, seen.files) == ("hook\ndeleted 1\n", {"left": b"text"}), seen.stderr


def test_limits_are_those_of_the_call(bare: Daemon) -> None:
    code = "import resource as r\n[r.getrlimit(x) for x in (r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE)]"
    cases = [(16, 2**30, 256), (64, 64 * 2**20, 32), (16, 512 * 2**20, 160), (1000, 16 * 2**20, 32)]
    for processes, memory, open_files in cases:
        seen = bare.run(code, cpu_seconds=1.5, processes=processes, memory_bytes=memory)
        assert seen.value == str([(2, 3), (open_files, open_files), (64 * 2**20, 64 * 2**20)])


# Random numbers


@pytest.mark.parametrize("generator", ["random.random", "numpy.random.rand", "sympy.core.random.random"])
def test_the_same_seed_gives_the_same_numbers_also_where_a_generator_is_imported_late(
    bare: Daemon, generator: str
) -> None:
    module, _, function = generator.rpartition(".")
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    late = f"import importlib\nimportlib.import_module({module[:2]!r} + {module[2:]!r}).{function}()"
    loaded = f"{late}  # {package}: its tier is chosen by the name"
    first, same, other = (bare.run(code, seed=seed).value for code, seed in ((late, 1), (loaded, 1), (loaded, 2)))
    assert first == same != other
    assert len({bare.run(code).value for code in (late, loaded, loaded)}) == 3, "without a seed each draws anew"


def test_forks_of_a_program_draw_other_numbers_than_the_program(bare: Daemon) -> None:
    code = """
import os, random
source, sink = os.pipe()
if os.fork() == 0:
    os.write(sink, repr(random.random()).encode())
    os._exit(0)
print(os.read(source, 100).decode() != repr(random.random()))
"""
    assert bare.run(code).stdout == "True\n"


# Files


def test_what_is_not_a_file_below_the_working_directory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert channel.write_files({"real": b"r", "folder/f": b"f"}) == ""
    for name, target in {"link": os.__file__, "near": "real", "root": "/", "way": "folder", "up": ".."}.items():
        os.symlink(target, name)
    os.mkfifo("pipe")
    names = ["link", "near", "root/etc/passwd", "way/f", "up/etc/passwd", "pipe", "folder", ".", "", "a\0b", "none"]
    names += ["/etc/passwd", "../etc/passwd", "folder/../../etc/passwd", "/dev/zero", "real/", "folder/f"]
    assert channel.read_files(names) == {"real/": b"r", "folder/f": b"f"}
    assert channel.read_files(["./folder/../real"]) == {"./folder/../real": b"r"}


def test_more_than_the_bound_is_left_out_and_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"huge": channel.MAX_FILES_BYTES + 1, "most": channel.MAX_FILES_BYTES - 1, "two": 2, "one": 1}
    channel.write_files({name: bytes(size) for name, size in sizes.items()})
    found = channel.read_files(list(sizes))
    assert {name: len(content) for name, content in found.items()} == {"most": channel.MAX_FILES_BYTES - 1, "one": 1}


NUMPY = Tier("numpy", ("numpy",))
SYMPY = Tier("sympy", ("numpy", "sympy"))
EVERYTHING = Tier("everything", ("numpy", "sympy", "scipy", "scipy.stats"))
OWN = Tier("preload", ("shapes.flat",))


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        ("print(1)", BARE),
        ("import math", BARE),
        ("import numpy as np", NUMPY),
        ("from numpy.linalg import det", NUMPY),
        ("import os, numpy", NUMPY),
        ("from sympy import *", SYMPY),
        ("import mpmath", SYMPY),
        ("import numpy, sympy", SYMPY),
        ("import scipy.stats", EVERYTHING),
        ("import shapes", OWN),
        ("numpythonic = 1", BARE),
        ("__import__('base64')", OWN),
        ("import numpy, shapes", NUMPY),
    ],
)
def test_tier_follows_the_packages_a_program_names(code: str, tier: Tier) -> None:
    assert chooser((BARE, NUMPY, OWN, SYMPY, EVERYTHING))(code) == tier


def test_offered_tiers_are_those_that_can_be_imported_cheapest_first() -> None:
    offered = offered_tiers(("json", "no_such_module"))
    sizes = [len(tier.modules) for tier in offered]
    assert offered[0] is BARE  # others look for it by identity
    assert sizes == sorted(sizes)
    assert Tier("preload", ("json", "no_such_module")) in offered  # the operator is told when it cannot be had
    assert not any("no_such_module" in tier.modules for tier in offered_tiers(()))
    assert [tier.modules for tier in offered_tiers(("numpy",))].count(("numpy",)) == 1, "ours is not offered twice"


def test_preloaded_modules_are_there_no_thread_is_and_others_are_imported_under_default_limits(bare: Daemon) -> None:
    pytest.importorskip("numpy")
    order = "list({'a', 'b', 'c', 'd', 'e'})"
    with Daemon(preload=("numpy", "colorsys"), slots=1) as daemon:
        assert (daemon.info.preload, daemon.info.slots, daemon.info.node) == (
            ("numpy", "colorsys"),
            1,
            os.uname().nodename,
        )
        assert daemon.info.tiers[0] == "bare"
        seen = daemon.run("import sys, threading\n'colorsys' in sys.modules, threading.active_count()")
        assert seen.value == "(True, 1)"
        assert daemon.run(order).value == bare.run(order).value, "the order of a set is the same in every sandbox"
    seen = bare.run("import sys\nname = 'num' 'py'\nname in sys.modules, int(__import__(name).eye(4).sum())")
    assert seen.value == "(False, 4)", seen


def test_packages_that_only_pythonpath_names_are_there_and_a_checkout_is_not(tmp_path: Path) -> None:
    """As a user's own installation, a module of a cluster or `pip install --target` have them, below a link too."""
    (tmp_path / "project.py").touch()
    checkout = Path(__file__).resolve().parents[2]
    (tmp_path / "link").symlink_to(Path(sysconfig.get_path("purelib")).parent)
    path = os.pathsep.join([str(tmp_path), str(checkout), str(tmp_path / "link/site-packages")])
    program = "import numpy\ntry:\n    import project\nexcept ImportError:\n    print(numpy.arange(3).sum())"
    code = f"from rocstar.sandbox.client import run_once; print(run_once({program!r}).stdout)"
    outside = [sys._base_executable, "-s", "-c", code]  # type: ignore[attr-defined]
    done = subprocess.run(outside, env={"PYTHONPATH": path, "PATH": "/usr/bin"}, capture_output=True, text=True)
    assert done.stdout == "3\n\n", done.stderr
