"""Forks of sessions at the daemon: what a branch begins with, that it is like any session, and what is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from typing import Any, cast

import psutil
import pytest

from rocstar.sandbox.call import MAX_BRANCHES, ForkRefused, Limits, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.client import SandboxClient, Session
from rocstar.sandbox.daemon.snapshot import PAGE, Lineage, Snapshot, new_file, seal
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import Daemon, eventually

OK, REJECTED = ProgramOutcome.OK, ProgramOutcome.REJECTED
NOTHING, PIPE = subprocess.DEVNULL, subprocess.PIPE
BEGINNING = """
    import decimal, os, random, threading
    class Kept:
        pass
    kept, names = Kept(), {"list": [1, 2]}
    decimal.getcontext().prec = 7
    local = threading.local()
    local.value = 5
    os.makedirs("d/e" + "/f" * 300)  # deeper than files may be open at once
    os.symlink("../log", "d/link")
    with open("log", "w") as file:
        file.write("abc")
    os.chmod("log", 0o640)
    random.random()
"""
SEEN = """(
    os.getpid(), id(kept), type(kept).__name__, names, decimal.getcontext().prec, local.value, os.getcwd(),
    os.listdir("."), os.path.isdir("d/e" + "/f" * 300), open("d/link").read(), os.stat("log").st_mode,
    os.stat("log").st_mtime_ns)"""


@pytest.fixture(scope="module", params=[0])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(skip_plans=request.param, slots=4) as started:
        if started.info.isolation != "L3":
            pytest.skip("sessions are forked where there are namespaces")
        yield started


by_root_and_user = pytest.mark.parametrize("daemon", [0, 1], indirect=True, ids=["root", "user"])
"""Where walls matter: both ways to have namespaces."""


def begin(daemon: Daemon, name: str, code: str, **limits: Any) -> None:
    response = daemon.cell(name, 1, textwrap.dedent(code), **limits)
    assert response.outcome is OK, response


def fork(daemon: Daemon, name: str, *branches: str, **limits: Any) -> Response:
    return daemon.run("", session=name, cell=2, branches=branches, **limits)


def forked(daemon: Daemon, name: str, *branches: str, **limits: Any) -> tuple[str, ...]:
    response = fork(daemon, name, *branches, **limits)
    assert response.outcome is OK, response
    return branches


def value(daemon: Daemon, name: str, code: str, **limits: Any) -> str | None:
    response = daemon.cell(name, 2, code, **limits)
    assert response.outcome is OK, response
    return response.value


def end(daemon: Daemon, *names: str) -> None:
    for name in names:
        daemon.end(name)


@by_root_and_user
def test_a_branch_has_the_names_memory_and_files_and_all_go_their_own_way(daemon: Daemon) -> None:
    begin(daemon, "a", BEGINNING)
    family = ("a", *forked(daemon, "a", "a.1", "a.2"))
    assert len({value(daemon, name, SEEN) for name in family}) == 1
    for name in family:
        value(daemon, name, f"names[{name!r}] = 1; open('log', 'a').write({name!r}); os.remove('d/link')")
    for name in family:
        seen = value(daemon, name, "list(names), open('log').read(), os.listdir('d')")
        assert seen == repr((["list", name], f"abc{name}", ["e"]))
    assert len({value(daemon, name, "random.random()") for name in family}) == 3, "they draw other numbers"
    end(daemon, *family)


def test_branches_are_forked_again_and_outlive_what_they_came_from(daemon: Daemon) -> None:
    begin(daemon, "b", "x = [1]\nimport random")
    forked(daemon, "b", "b.1")
    daemon.end("b")
    value(daemon, "b.1", "x.append(2)")
    forked(daemon, "b.1", "b.1.1", "b.1.2")
    daemon.end("b.1")
    assert value(daemon, "b.1.1", "x") == "[1, 2]"
    assert value(daemon, "b.1.1", "random.random()") != value(daemon, "b.1.2", "random.random()")
    assert daemon.frame(daemon.submit("x", session="b.1", cell=2)).kind is FrameKind.LOST
    end(daemon, "b.1.1", "b.1.2")


def test_what_branches_draw_is_drawn_again_with_the_same_seed(daemon: Daemon) -> None:
    drawn = []
    for _ in range(2):
        begin(daemon, "s", "import random", seed=7)
        drawn.append([value(daemon, name, "random.random()") for name in ("s", *forked(daemon, "s", "s.1", "s.2"))])
        end(daemon, "s", "s.1", "s.2")
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_as_many_branches_as_there_may_be_run_and_leave_nothing(daemon: Daemon) -> None:
    before = len(daemon.below())
    begin(daemon, "m", "held = [str(n) for n in range(50_000)]")
    branches = forked(daemon, "m", *(f"m.{n}" for n in range(MAX_BRANCHES)))
    numbers = [
        daemon.submit(f"held[{n}] += '!'; held[{n}], len(held)", session=b, cell=2) for n, b in enumerate(branches)
    ]
    assert [daemon.answer(number).value for number in numbers] == [f"('{n}!', 50000)" for n in range(MAX_BRANCHES)]
    assert value(daemon, "m", "held[0]") == "'0'"
    notebooks = [each for each in daemon.programs() if each.memory_info().rss > 2**20]
    own = [psutil.Process(each.pid).memory_full_info() for each in notebooks]
    assert sum(each.pss for each in own) < 0.5 * sum(each.rss for each in own), "memory is shared"
    end(daemon, "m", *branches)
    assert eventually(lambda: len(daemon.below()) <= before)


@by_root_and_user
def test_harm_in_a_branch_stays_there_and_limits_hold_in_each(daemon: Daemon) -> None:
    limits = {"memory_bytes": 2**26, "processes": 5}
    begin(daemon, "h", "import os, signal, time\nx = 1", **limits)
    branches = forked(daemon, "h", *(f"h.{n}" for n in range(5)), **limits)
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ends = (
        ("os.kill(os.getpid(), 9)", "signal", True),
        ("held = bytearray(2**27)", "memory", False),
        (bomb, "wall_timeout signal", None),
        ("open('f', 'wb').write(bytes(2**20) * 65)", "exception memory", None),
        ("while True: pass", "wall_timeout", False),
    )
    numbers = [
        daemon.submit(code, session=name, cell=2, wall_seconds=1.0, **limits)
        for name, (code, _, _) in zip(branches, ends, strict=True)
    ]
    assert value(daemon, "h", "x", **limits) == "1"
    for number, (code, outcomes, lost) in zip(numbers, ends, strict=True):
        response = daemon.answer(number)
        assert response.outcome in outcomes.split() and lost in (response.state_lost, None), (code, response)
    assert value(daemon, "h", "x", **limits) == value(daemon, "h.4", "x", **limits) == "1"
    end(daemon, "h", *branches)


@by_root_and_user
def test_branches_and_their_parent_cannot_reach_each_other(daemon: Daemon) -> None:
    begin(daemon, "r", "import os, signal, socket\nopen('mine', 'w').write('r')")
    family = ("r", *forked(daemon, "r", "r.1", "r.2"))
    for name in family:
        value(daemon, name, f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}'); s.listen(); open('{name}', 'w')")
    reach = """
        found = []
        for pid in range(2, 5000):
            try:
                os.kill(pid, signal.SIGKILL) if pid != os.getpid() else found.append(pid)
                found.append(pid) if pid != os.getpid() else None
            except OSError:
                pass
        for name in ("r", "r.1", "r.2"):
            try:
                socket.socket(socket.AF_UNIX).connect("\\0" + name)
                found.append(name)
            except OSError:
                pass
        found + sorted(os.listdir("."))"""
    for name in family:
        pid = value(daemon, name, "os.getpid()")
        assert value(daemon, name, textwrap.dedent(reach)) == f"[{pid}, {name!r}, 'mine', {name!r}]"
    end(daemon, *family)


def test_a_fork_waits_for_the_cell_before_it(daemon: Daemon) -> None:
    begin(daemon, "w", "import time")
    slow = daemon.submit("time.sleep(0.5); x = 7", session="w", cell=2)
    forked(daemon, "w", "w.1")
    assert daemon.answer(slow).outcome is OK and value(daemon, "w.1", "x") == "7"
    end(daemon, "w", "w.1")


REFUSED = {
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()", "2 threads"),
    "sockets": ("import socket\npair = socket.socketpair()", "is open, and a fork would not have it"),
    "files": ("file = open('f', 'w')", "f) is open, and a fork would not have it; close it"),
    "deleted": ("import os\nfile = open('f', 'w')\nos.remove('f')", "(deleted)) is open"),
    "shared": ("import mmap\nshared = mmap.mmap(-1, 4096)", "shares memory"),
    "pipes": ("import os\nos.mkfifo('p')", "neither a file nor"),
    "locked": ("import os\nos.mkdir('d', 0)", "'/tmp/d' could not be copied"),
    "large": ("for n in range(3):\n    open(f'{n}', 'wb').truncate(2**26 - 1)", "could not be copied"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_carried_over_is_refused_in_a_sentence_and_the_session_goes_on(
    daemon: Daemon, what: str
) -> None:
    code, why = REFUSED[what]
    begin(daemon, what, f"{code}\nx = 1")
    response = fork(daemon, what, f"{what}.1")
    assert response.outcome is REJECTED and why in response.message, response
    assert value(daemon, what, "x") == "1"
    assert daemon.frame(daemon.submit("1", session=f"{what}.1", cell=2)).kind is FrameKind.LOST
    end(daemon, what)


MODULES = """
import ctypes, os, sys, time
p, notebook = (sys.modules[f"rocstar.sandbox.slot.{name}"] for name in ("_fork", "notebook"))
"""
HOSTILE = {
    "who does not wait": "p.pause = lambda control, message: os.write(control, message) and False",
    "who waits forever": "p.pause = lambda control, message: time.sleep(60)",
    "who dies": "p.pause = lambda control, message: os._exit(0)",
    "whose branches die": "os.register_at_fork(after_in_child=lambda: os._exit(0))",
    "who packs rubbish": "notebook.pack = lambda folder, fd: os.write(fd, b'\\xff' * 99) and ''",
    "who packs paths outside": """
import marshal
notebook.pack = lambda f, fd: os.write(fd, marshal.dumps(('../etc/passwd', 0o100644, 0, '', 0))) and ''
""",
    "in pieces": """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
at = libc.mmap(None, 60000 * 4096, 1, 0x22, -1, 0)
for page in range(0, 60000, 2):
    libc.mprotect(at + page * 4096, 4096, 3)
""",
    "whose file has shrunk": """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
fd = os.open('f', os.O_CREAT | os.O_RDWR)
os.truncate('f', 2**20)
ctypes.memset(libc.mmap(None, 2**20, 3, 2, fd, 0), 1, 1)  # private, and may be written
os.truncate('f', 0)
os.close(fd)
""",
    "without its arena": "ctypes.CDLL(None).munmap(ctypes.c_void_p(p.arena[0]), ctypes.c_size_t(p.arena[1]))",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_notebook_harms_its_own_fork_only(daemon: Daemon, what: str) -> None:
    begin(daemon, "other", "x = 1")
    begin(daemon, "evil", MODULES + HOSTILE[what])
    response = fork(daemon, "evil", "evil.1", wall_seconds=2.0)
    assert isinstance(response.outcome, ProgramOutcome)  # its own doing, no outage
    if response.outcome is OK:  # what became a copy is behind walls of its own
        daemon.answer(daemon.submit("1", session="evil.1", cell=2)) if what == "who does not wait" else None
    else:
        assert daemon.frame(daemon.submit("1", session="evil.1", cell=2)).kind is FrameKind.LOST
    assert forked(daemon, "other", "other.1") and value(daemon, "other.1", "x") == "1"
    end(daemon, "evil", "evil.1", "other", "other.1")


def test_a_refused_fork_ends_no_session() -> None:
    with Daemon(session_slots=4) as daemon:
        for name in ("idle", "n"):
            begin(daemon, name, "x = 1")
        assert "pass the 4 sessions" in fork(daemon, "n", "n.1", "n.2", "n.3", "n.4").message
        assert "already" in fork(daemon, "n", "n.1", "n.2", "n.3", "n").message
        begin(daemon, "n", "import os; pipe = os.pipe()")
        assert "descriptor" in fork(daemon, "n", "n.1", "n.2", "n.3").message
        assert value(daemon, "idle", "x") == "1" and daemon.usage().sessions == 2
        begin(daemon, "n", "x = 2")
        forked(daemon, "n", "n.1", "n.2", "n.3")
        assert daemon.frame(daemon.submit("x", session="idle", cell=2)).kind is FrameKind.LOST


def test_sessions_are_not_forked_without_namespaces() -> None:
    with Daemon(skip_plans=2) as daemon:
        begin(daemon, "l", "x = 1")
        assert "namespaces" in fork(daemon, "l", "l.1").message and value(daemon, "l", "x") == "1"


@pytest.mark.parametrize("count", ["2", 0, MAX_BRANCHES + 1, 2.0])
async def test_a_count_of_branches_that_is_none_is_refused_in_a_sentence(count: Any) -> None:
    session = Session(cast(Any, None), Limits(), 0)
    with pytest.raises(ForkRefused, match=rf"1 to {MAX_BRANCHES} branches at once, got {count!r}"):
        await session.fork(count)


async def test_branches_of_a_fork_that_nobody_waits_for_are_closed() -> None:
    client = await asyncio.to_thread(SandboxClient.start, slots=1, preload=())
    with client:
        session = client.open_session()
        await session.run("x = [str(n) for n in range(200_000)]")
        waiting = asyncio.create_task(session.fork(MAX_BRANCHES))  # so many take longer than the call waits here
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await session.run("len(x)")).value == "200000"
        await asyncio.sleep(1.0)  # usage is told with the next answer
        await session.run("1")
        await asyncio.sleep(1.0)
        assert client.usage().sessions == 1


def test_a_zygote_that_has_died_and_is_still_listed_is_no_fault_of_the_cells() -> None:
    """Its maps are empty, so a table of the system's that both share would look like memory that the cell shares."""
    dead = subprocess.Popen(["true"], stdin=NOTHING, stdout=NOTHING, stderr=NOTHING)
    notebook = subprocess.Popen(["sh", "-c", "echo; read line"], stdin=PIPE, stdout=PIPE, stderr=NOTHING)
    try:
        eventually(lambda: psutil.Process(dead.pid).status() == psutil.STATUS_ZOMBIE)
        assert notebook.stdout and notebook.stdout.read(1)  # it has begun, and no file of its beginning is open
        with (
            Snapshot(notebook.pid, Lineage(dead.pid, 0, 0)) as snapshot,
            pytest.raises(ProcessLookupError, match="died"),
        ):
            snapshot.take(2**20)
    finally:
        notebook.kill()
        notebook.communicate()
        dead.wait()


def test_a_copy_is_sealed_once_its_pages_are_let_go_of() -> None:
    """As on a busy machine, where whoever holds a page of it for a moment gets no CPU to let go of it."""
    packed = new_file("packed")
    out, into = os.pipe()
    os.pwrite(packed, bytes(PAGE), 0)
    os.splice(packed, into, PAGE, offset_src=0)
    later = threading.Timer(0.4, os.read, (out, PAGE))
    later.start()
    seal(packed)
    with pytest.raises(PermissionError):
        os.pwrite(packed, b"x", 0)
    later.join()
    for fd in (packed, out, into):
        os.close(fd)


def test_a_dead_zygote_is_told(daemon: Daemon) -> None:
    begin(daemon, "z", "x = 1")
    daemon.zygotes()[0].kill()
    frame = daemon.frame(daemon.submit("", session="z", cell=2, branches=("z.1",)))
    assert frame.kind is FrameKind.LOST or ServiceOutcome.INTERNAL.encode() in frame.body
    # A call that met the dying zygote is an outage, which callers try again.
    assert any(daemon.run("1").value == "1" for _ in range(10))
