"""Sessions at the daemon: one live process each, cells in order, children swept, loss said."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Iterator
from unittest.mock import Mock

import psutil
import pytest

from rocstar.sandbox import wire
from rocstar.sandbox.call import DaemonSettings, Failure, Limits
from rocstar.sandbox.daemon.sessions import NotebookSession, Sessions
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import Daemon, eventually, needs_empty_folder

CHILDREN = {
    "child": "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
    """,
    "bomb": """
        import os, time
        for _ in range(9):
            if os.fork() == 0:
                time.sleep(60)
    """,
    "siblings": """
        import ctypes, time
        CLONE_PARENT_AND_SIGCHLD = 0x8011
        for _ in range(3):
            if ctypes.CDLL(None).syscall(56, CLONE_PARENT_AND_SIGCHLD, 0, 0, 0, 0) == 0:
                time.sleep(60)
    """,
}


@pytest.fixture(scope="module", params=[0, 2], ids=["namespaces", "confined"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(skip_plans=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    with Daemon(session_slots=2, grace_seconds=1.0) as started:
        yield started


@pytest.fixture
def own(small: Daemon) -> Iterator[Daemon]:
    """With nobody else's session; a test may break all below it."""
    yield small
    small.end_sessions()


def lost(daemon: Daemon, session: str, cell: int) -> bool:
    return daemon.frame(daemon.submit("1", session=session, cell=cell)).kind is FrameKind.LOST


def test_cells_share_names_and_files_and_seed_and_are_answered_as_programs_are(daemon: Daemon) -> None:
    begun = daemon.cell("a", 1, "import random\nx = 20\nopen('f', 'w').write('kept')\nprint('out')", seed=5)
    assert (begun.outcome, begun.stdout, begun.exit_code, begun.isolation) == ("ok", "out\n", 0, daemon.info.isolation)
    assert begun.cpu_seconds > 0 and begun.run_seconds > 0 and begun.peak_memory_bytes > 2**20
    response = daemon.cell("a", 2, "x + 1, open('f').read(), open('in').read()", files={"in": b"new"}, fetch=("f",))
    assert (response.value, response.files) == ("(21, 'kept', 'new')", {"f": b"kept"})
    other = daemon.cell("b", 1, "import random\nrandom.random()", seed=5)
    assert daemon.cell("a", 3, "random.random()").value == other.value


def test_a_failed_cell_keeps_what_it_did_and_shows_the_lines_of_cells(own: Daemon) -> None:
    own.cell("fail", 1, "x = 1\ndef fail():\n    raise ValueError(x)")
    failed = own.cell("fail", 2, "y = 2\n\nfail()")
    assert (failed.outcome, failed.state_lost) == ("exception", False)
    assert failed.exception == Failure(type="ValueError", message="1", line=3)
    told = [line for line in failed.stderr.splitlines() if line.strip("~^ ")]  # marks, by the version of Python
    assert told == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 3, in <module>',
        "    fail()",
        '  File "<cell 1>", line 3, in fail',
        "    raise ValueError(x)",
        "ValueError: 1",
    ]
    assert own.cell("fail", 3, "x, y").value == "(1, 2)"


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code", "exception"),
    [
        ("input()", "exception", 1, Failure(type="EOFError", message="EOF when reading a line", line=1)),
        ("x = = 1", "exception", 1, Failure(type="SyntaxError", message="invalid syntax (<cell 2>, line 1)", line=1)),
        ("import sys\nsys.exit(3)", "exit_nonzero", 3, None),
        ("import os\nos.fork()\nNone", "ok", 0, None),
    ],
)
def test_a_cell_ends_and_the_session_goes_on(
    own: Daemon, code: str, outcome: str, exit_code: int, exception: Failure | None
) -> None:
    own.cell("ends", 1, "x = 1")
    response = own.cell("ends", 2, code)
    assert (response.outcome, response.exit_code, response.exception) == (outcome, exit_code, exception)
    assert (response.state_lost, own.cell("ends", 3, "x").value) == (False, "1")


def test_threads_and_pickles_live_on(own: Daemon) -> None:
    own.cell("live", 1, "import pickle, queue, threading\nq, r = queue.Queue(), queue.Queue()")
    own.cell("live", 2, "threading.Thread(target=lambda: r.put(q.get() * 2), daemon=True).start()")
    code = "class C: pass\nq.put(21)\nr.get(), pickle.loads(pickle.dumps(C())).__class__ is C"
    assert own.cell("live", 3, code).value == "(42, True)"


def test_files_that_cannot_be_written_are_refused_and_the_cell_is_not_run(daemon: Daemon) -> None:
    daemon.cell("refused", 1, "import os\nos.mkdir('d')\nx = 1")
    response = daemon.cell("refused", 2, "x = 2", files={"d": b""})
    assert (response.outcome, "could not be written" in response.message) == ("rejected", True)
    assert daemon.cell("refused", 3, "x").value == "1"


def test_figures_left_open_come_back_as_png_and_are_closed(own: Daemon) -> None:
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as plt\nfor _ in range({}): plt.figure(figsize=(1, 1))\nplt.show()"
    fake = "import sys, types\nfake = sys.modules['matplotlib.pyplot'] = types.ModuleType('p')"
    codes = [code.format(2) + "\n1 / 0", "plt.get_fignums()", code.format(20)]
    codes += [f"{fake}\nfake.get_fignums = lambda: 7", "6 * 7"]
    failed, closed, many, _, last = (own.cell("plot", n, code, memory_bytes=2**30) for n, code in enumerate(codes, 1))
    assert [image[:4] for image in failed.images] == [b"\x89PNG"] * 2
    assert failed.exception is not None and failed.exception.type == "ZeroDivisionError"
    assert (closed.value, len(many.images), last.value) == ("[]", 16, "42")


def test_cells_of_one_session_run_in_order_whatever_waits_for_what(own: Daemon) -> None:
    code = "order = [*globals().get('order', []), {}]\norder"
    numbers = [own.submit(code.format(n), session="d", cell=n) for n in range(1, 9)]
    assert [own.answer(number).value for number in numbers][-1] == str(list(range(1, 9)))


@pytest.mark.parametrize(
    ("code", "limits", "outcome"),
    [
        ("x = 2\ntime.sleep(60)", {"wall_seconds": 0.3}, "wall_timeout"),
        ("x = 2\nasyncio.run(asyncio.sleep(60))", {"wall_seconds": 0.3}, "wall_timeout"),
        ("x = 2\ntry:\n    while True: pass\nexcept Exception: pass", {"cpu_seconds": 0.3}, "cpu_timeout"),
        ("x = 2\nwhile True: print('y' * 1000)", {"output_bytes": 5000}, "output_limit"),
        ("x = 2\nb = bytearray(10**10)", {}, "memory"),
    ],
)
def test_a_cell_over_its_limit_is_interrupted_and_the_session_goes_on(
    daemon: Daemon, code: str, limits: dict[str, float], outcome: str
) -> None:
    name = f"limit-{code[:40]}"
    daemon.cell(
        name, 1, "x = 1\nimport asyncio, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)"
    )  # is replaced
    for number in (2, 3):
        response = daemon.cell(name, number, code, **limits)
        assert (response.outcome, response.state_lost) == (outcome, False), response
        assert len(response.stdout) <= 5000
    assert daemon.cell(name, 4, "x, len(bytearray(2**26))").value == f"(2, {2**26})"


def test_a_process_that_an_earlier_cell_did_not_wait_for_takes_no_cpu_of_this_cell(daemon: Daemon) -> None:
    burn = """
import os, time
if (pid := os.fork()) == 0:
    while time.process_time() < 0.5: pass
    os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"""
    assert daemon.cell("left", 1, burn, cpu_seconds=5.0).outcome == "ok"
    response = daemon.cell("left", 2, "time.sleep(0.6); 7", cpu_seconds=0.3)
    assert (response.outcome, response.value) == ("ok", "7")


def test_each_cell_has_its_own_limit_of_cpu(own: Daemon) -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    assert [own.cell("burn", n, burn, cpu_seconds=0.5).outcome for n in (1, 2)] == ["ok", "ok"]


def test_threads_that_use_a_second_between_cells_are_stopped_until_the_next_one(own: Daemon) -> None:
    """The session was ended, and one that is replayed ran all its cells again for each next one."""
    own.cell("hog", 1, "import threading\ndef hog():\n    while True: pass\nthreading.Thread(target=hog).start()")
    (process,) = own.programs()
    for number in (2, 3):
        assert eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        assert own.cell("hog", number, "hog.__name__").value == "'hog'"


def test_an_interrupt_between_cells_is_ignored(own: Daemon) -> None:
    own.cell("between", 1, "x = 1")
    (process,) = own.programs()
    for number in (2, 3, 4):
        process.send_signal(signal.SIGINT)
        assert own.cell("between", number, "x").value == "1"


@pytest.mark.parametrize("kept", [True, False], ids=["a handler raises", "a thread ends it"])
def test_what_a_cell_left_running_between_cells_is_no_loss_of_the_service(own: Daemon, kept: bool) -> None:
    """The next cell was lost, and run again after the earlier ones, or its attempt failed for no fault of ours."""
    own.cell(
        "left",
        1,
        f"""
import os, select, signal, threading
del select.poll  # as eventlet does
x = []
def ends(*_):
    x.append(1)
    len(x) < 9 or signal.setitimer(signal.ITIMER_REAL, 0)
    raise TimeoutError
signal.signal(signal.SIGALRM, ends)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01 * {kept})
threading.Timer(0.01, {kept} or os._exit, [0]).start()
""",
    )
    assert eventually(lambda: not own.programs(), seconds=0.2 if kept else 60.0) is not kept
    response = own.cell("left", 2, "len(x) == 9")
    assert (response.value, response.state_lost, response.outcome == "ok") == ("True" if kept else None, not kept, kept)
    assert kept or ("by itself" in response.stderr and lost(own, "left", 3))


@pytest.mark.parametrize(
    ("at_limit", "short", "own"), [(True, "memory", True), (False, "memory", False), (False, "", True)]
)
def test_a_process_that_is_killed_between_cells_is_its_own_loss_only_at_its_own_limit(
    at_limit: bool, short: str, own: bool
) -> None:
    """The kernel's count of kills is the machine's, with those at a group's own limit."""
    session, sessions = NotebookSession("s", "", Limits(), 0), Sessions(DaemonSettings(), *(Mock() for _ in range(4)))
    sessions.alive["s"] = session
    session.worker = worker = Mock()
    worker.group.killed.side_effect = lambda: setattr(worker, "blamed", lambda *_: short) or at_limit
    worker.blamed = lambda *_: ""  # of what was counted before
    sessions.process_ended(session, Mock())
    assert (session.ended, "s" in sessions.alive) == (own, own)


def test_a_cell_that_others_kept_from_beginning_is_interrupted_once_it_has_begun(own: Daemon) -> None:
    own.cell("late", 1, "x = 1")
    (process,) = own.programs()
    process.suspend()
    number = own.submit("while True: pass", session="late", cell=2, wall_seconds=0.2)
    time.sleep(0.5)  # its first interrupt has been sent
    process.resume()
    response = own.answer(number)
    assert (response.outcome, response.state_lost) == ("wall_timeout", False), response
    assert own.cell("late", 3, "x").value == "1"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os\nos._exit(3)", "exit_nonzero"),
        ("import ctypes\nctypes.string_at(0)", "signal"),
        ("import signal, time\nsignal.signal(2, signal.SIG_IGN)\nwhile True: time.sleep(0.1)", "wall_timeout"),
        ("import os, time\nos.closerange(3, 256)\ntime.sleep(60)", "wall_timeout"),
    ],
)
def test_a_cell_that_ends_its_process_is_told_truly_and_the_session_is_lost(
    own: Daemon, code: str, outcome: str
) -> None:
    own.cell("e", 1, "x = 1")
    response = own.cell("e", 2, code, wall_seconds=1.0)
    assert (response.outcome, response.state_lost) == (outcome, True), response
    assert lost(own, "e", 3)
    assert own.cell("e", 1, "'x' in globals()").value == "False"


@pytest.mark.parametrize("code", CHILDREN.values(), ids=CHILDREN)
def test_nothing_a_cell_started_outlives_it(daemon: Daemon, code: str) -> None:
    name = f"children-{code[:40]}"
    daemon.cell(name, 1, "x = 1")
    before = len(daemon.below())
    for n in (2, 3):
        daemon.cell(name, n, textwrap.dedent(code))
        assert eventually(lambda: len(daemon.below()) <= before)
    assert daemon.cell(name, 4, "x").value == "1"


def test_a_closed_session_is_gone_with_its_process_and_its_waiting_cells(own: Daemon) -> None:
    before = len(own.below())
    first = own.begin(session="f", cell=1)
    second = own.submit("1", session="f", cell=2)
    own.end("f")
    assert own.frame(second).kind is FrameKind.LOST
    closed = own.answer(first)
    assert (closed.outcome, closed.state_lost) == ("cancelled", True)
    assert eventually(lambda: len(own.below()) <= before)
    own.send(FrameKind.CLOSE, b"\xc1")
    own.end("nobody's")
    assert own.run("1").value == "1"


def test_the_end_of_a_session_is_reported_without_being_asked_for(own: Daemon) -> None:
    own.cell("u", 1, "x = 1")
    assert eventually(lambda: own.usage().sessions == 1)
    own.end("u")
    while (frame := own.next_frame()).kind is not FrameKind.USAGE or wire.decode_usage(frame.body).sessions:
        pass  # one of before; where no other comes, the next read runs into its limit


def test_a_cancelled_cell_is_interrupted_and_one_that_waits_is_passed_over(own: Daemon) -> None:
    own.cell("g", 1, "x = 1")
    running = own.begin("x = 2", session="g", cell=2)
    waiting = own.submit("x = 3", session="g", cell=3)
    last = own.submit("x", session="g", cell=4)
    for number in (waiting, running):
        own.send(FrameKind.CANCEL, number=number)
    assert [own.answer(number).outcome for number in (waiting, running)] == ["cancelled", "cancelled"]
    assert own.answer(last).value == "2"


def test_the_session_idle_for_longest_makes_way_and_busy_ones_do_not(own: Daemon) -> None:
    for name in ("one", "two", "three"):
        own.cell(name, 1, "1")
    assert lost(own, "one", 2)
    busy = [own.begin(session=name, cell=2) for name in ("two", "three")]
    response = own.cell("four", 1, "1")
    assert (response.outcome, "2 sessions are busy" in response.message) == ("overloaded", True)
    assert own.usage().sessions == 2
    for number in busy:
        assert own.cancel(number).outcome == "cancelled"


def test_limits_of_the_whole_session_are_those_of_its_first_cell(own: Daemon) -> None:
    own.cell("i", 1, "1", memory_bytes=2**28)
    response = own.cell("i", 2, "1", memory_bytes=2**29)
    assert (response.outcome, response.isolation) == ("rejected", "")
    assert f"was set to {2**28} by its first cell" in response.message
    assert own.cell("i", 3, "7", memory_bytes=2**28, cpu_seconds=3.0).value == "7"


def test_a_session_whose_slot_is_killed_is_lost_and_others_live(own: Daemon) -> None:
    own.cell("j", 1, "1")
    before = {process.pid for process in own.below()}
    own.cell("k", 1, "y = 7")
    new = [process for process in own.below() if process.pid not in before]
    number = own.begin(session="k", cell=2)
    psutil.Process(min(process.pid for process in new)).kill()  # its keeper
    response = own.answer(number)
    assert (response.outcome, response.state_lost) == ("internal", True)
    assert lost(own, "k", 3)
    assert own.cell("j", 2, "2").value == "2"


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.03])
def test_a_session_that_is_closed_while_it_starts_leaves_nothing(own: Daemon, seconds: float) -> None:
    before = len(own.below())
    number = own.submit("import time\ntime.sleep(60)", session="l", cell=1)
    time.sleep(seconds)
    own.end("l")
    assert own.frame(number).kind in (FrameKind.RESPONSE, FrameKind.LOST)
    assert own.usage().sessions == 0
    assert eventually(lambda: len(own.below()) <= before)
    assert own.cell("l", 1, "5").value == "5"


@needs_empty_folder
def test_sessions_and_programs_see_neither_files_nor_processes_of_each_other(daemon: Daemon) -> None:
    daemon.cell("m", 1, "open('secret', 'w').write('s')")
    look = "import os\nos.listdir('.'), [pid for pid in range(1, 100) if os.path.exists(f'/proc/{pid}/stat')]"
    for response in (daemon.cell("n", 1, look), daemon.run(look)):
        files, processes = eval(response.value or "")
        assert files == []
        assert processes == [] or daemon.info.isolation < "L3"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor pid in {-1, os.getppid(), *range(2, 40)} - {os.getpid()}:\n"
        "    try: os.kill(pid, 9)\n    except OSError: pass",
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, bytes(10))\n    except OSError: pass",
        "import os, marshal\nos.read = os.write = marshal.loads = None",
        "import struct, os\nwhile True: os.write(3, struct.pack('=I', 2) + b'[]')",
    ],
    ids=["kills", "writes everywhere", "breaks its loop", "forges reports"],
)  # fmt: skip
def test_a_cell_that_breaks_its_session_harms_no_other(daemon: Daemon, code: str) -> None:
    daemon.cell("victim", 1, "y = 7")
    daemon.cell("breaker", 1, "x = 1")
    assert daemon.cell("breaker", 2, code, wall_seconds=1.0).outcome != "internal"
    frame = daemon.frame(daemon.submit("1", session="breaker", cell=3, wall_seconds=1.0))
    assert frame.kind in (FrameKind.RESPONSE, FrameKind.LOST)
    assert daemon.cell("victim", 2, "y").value == "7"
    assert daemon.run("1").value == "1"
