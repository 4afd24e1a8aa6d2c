"""The live process of a session: what stays from cell to cell, how a cell ends, what a report carries."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.sandbox.slots import Programs, Session, Zygote, zygote

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def source() -> Iterator[Zygote]:
    with zygote() as started:
        yield started


@pytest.fixture
def session(source: Zygote) -> Iterator[Session]:
    started = opened(source)
    yield started
    started.control.close()


def opened(source: Zygote, **fields: int) -> Session:
    programs = Programs(source)
    programs.ready()
    return Session(source.spawn(programs.plan, session=True), **fields)


def values(session: Session, *cells: str) -> list[str | None]:
    return [session.cell(cell).value for cell in cells]


def interrupt_later(session: Session) -> None:
    """With SIGINT, once the cell has run for a while."""
    (process,) = psutil.Process(session.slot.hello["slot"]).children()
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGINT)).start()


# What stays


def test_a_failed_cell_keeps_what_it_did(session: Session) -> None:
    session.cell("x = 1\ndef fail():\n    raise ValueError(x)")
    seen = session.cell("y = 2\n\nfail()")
    assert seen.head == {"exception": ["ValueError", "1", 3], "status": 1}
    assert values(session, "x, y") == ["(1, 2)"]
    _, stderr = session.close()
    assert stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 3, in <module>',
        "    fail()",
        '  File "<cell 1>", line 3, in fail',
        "    raise ValueError(x)",
        "ValueError: 1",
    ]


def test_files_that_cannot_be_written_are_refused_and_the_cell_is_not_run(session: Session) -> None:
    session.cell("x = 1")
    assert "could not be written" in session.cell("x = 2", files={"a" * 300: b""}).head["refused"]
    assert values(session, "x") == ["1"]


def test_threads_and_pickles_live_on(session: Session) -> None:
    session.cell("import pickle, queue, threading\nq, r = queue.Queue(), queue.Queue()")
    session.cell("threading.Thread(target=lambda: r.put(q.get() * 2), daemon=True).start()")
    assert values(session, "q.put(21)\nr.get()", "class C: pass\npickle.loads(pickle.dumps(C())).__class__ is C") == [
        "42",
        "True",
    ]


# How a cell ends


@pytest.mark.parametrize(
    ("code", "head"),
    [
        ("input()", {"exception": ["EOFError", "EOF when reading a line", 1], "status": 1}),
        ("import sys\nsys.exit(3)", {"status": 3}),
        ("exit('bye')", {"status": 1}),
        ("x = = 1", {"exception": ["SyntaxError", "invalid syntax (<cell 1>, line 1)", 1], "status": 1}),
        ("b = bytearray(10**10)", {"exception": ["MemoryError", "", 1], "status": 1}),
        ("import os\nos.fork()\nNone", {"status": 0}),
        ("pass", {"status": 0}),
    ],
)
def test_a_cell_ends_and_the_session_goes_on(session: Session, code: str, head: dict[str, object]) -> None:
    assert session.cell(code).head == head
    assert values(session, "6 * 7") == ["42"]


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(60)", "import asyncio\nawait asyncio.sleep(60)"]
)
def test_an_interrupt_ends_a_cell_and_not_the_session(session: Session, code: str) -> None:
    session.cell("x = 1\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)")  # its own handler is replaced
    interrupt_later(session)
    assert session.cell(f"x = 2\n{code}").head["exception"][0] == "KeyboardInterrupt"
    assert values(session, "x") == ["2"]


def test_an_interrupt_between_cells_is_ignored(session: Session) -> None:
    session.cell("x = 1")
    (process,) = psutil.Process(session.slot.hello["slot"]).children()
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        assert values(session, "x") == ["1"]


def test_each_cell_has_its_own_limit_of_cpu(session: Session) -> None:
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    assert session.cell(burn.format(0.6), cpu_seconds=1.0).head == {"status": 0}
    assert session.cell(burn.format(0.6), cpu_seconds=1.0).head == {"status": 0}
    seen = session.cell("x = 1\ntry:\n    while True: pass\nexcept Exception: pass", cpu_seconds=1.0)
    assert seen.head["exception"][:2] == ["CPUTimeout", "the cell has used its 1 s of CPU"]
    assert values(session, "x") == ["1"]


def test_memory_is_limited_over_what_was_there_also_after_it_ran_out(source: Zygote) -> None:
    session = opened(source, memory_bytes=256 * 2**20)
    for _ in range(2):
        seen = session.cell("b = bytearray(300 * 2**20)")
        assert seen.head["exception"][0] == "MemoryError"
    assert values(session, "len(bytearray(2**26))") == [str(2**26)]


def test_a_session_ends_with_its_connection(session: Session) -> None:
    session.cell("print('out')\nimport sys\nsys.stderr.write('err')")
    assert session.close() == ("out\n", "err")


# What else a notebook can do


def test_a_cell_may_await_at_its_top_level_in_one_loop(session: Session) -> None:
    session.cell("import asyncio\nfuture = asyncio.Future()\nasyncio.get_running_loop()", fetch=[])
    cells = [
        "loop = None",
        "async def f():\n    return asyncio.get_running_loop()",
        "loop = await f()",
        "loop is await f()",
    ]
    assert values(session, *cells)[-1] == "True"
    assert values(session, "await asyncio.sleep(0, 'value')") == ["'value'"]


@needs_matplotlib
def test_figures_left_open_come_back_as_png_and_are_closed(session: Session) -> None:
    code = "import matplotlib.pyplot as plt\nfor _ in range({}): plt.figure(figsize=(1, 1)).add_subplot()\nplt.show()"
    seen = session.cell(code.format(2) + "\n1 / 0")
    sizes = seen.head["images"]
    images = [seen.tail[: sizes[0]], seen.tail[sizes[0] :]]
    assert len(sizes) == 2 and all(image.startswith(b"\x89PNG") for image in images)
    assert seen.head["exception"][0] == "ZeroDivisionError"
    assert session.cell("plt.get_fignums()").value == "[]"
    assert len(session.cell(code.format(20)).head["images"]) == 16


@needs_matplotlib
def test_a_module_in_pyplots_place_does_no_harm(session: Session) -> None:
    session.cell("import sys, types\nsys.modules['matplotlib.pyplot'] = types.ModuleType('p')")
    session.cell("def get_fignums(): return 7\nsys.modules['matplotlib.pyplot'].get_fignums = get_fignums")
    assert values(session, "6 * 7") == ["42"]
