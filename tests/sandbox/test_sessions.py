"""Notebooks as paused processes: what a cell leaves, what an undone one does not, and what hostile ones cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.jail import PLANS
from rocstar.sandbox.session import Session
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request, Response, SandboxDown, ServiceOutcome
from tests.sandbox.support import at_depth, children, ended, eventually, slot_depth

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=10.0)
WAYS = [*((n, True) for n in range(len(PLANS) - 1)), (0, False)]
LISTING = "import os\nsorted(name for name in os.listdir('.') if not os.path.ismount(name))"


@pytest.fixture(scope="module", params=WAYS, ids=[PLANS[n].name + ("" if fast else "-python") for n, fast in WAYS])
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    """Every way to isolate that this machine permits, and the fork path without the compiled part."""
    number, compiled = request.param
    sandbox = SandboxClient(slots=2, preload=(), skip_plans=number, compiled=compiled)
    sandbox.launch()
    try:
        sandbox.await_hello()
    except SandboxDown as error:
        sandbox.close()
        if "can be started here" not in str(error):
            raise
        pytest.skip(f"{PLANS[number].name} is not to be had here: {error}")
    with sandbox:
        if sandbox.info().isolation != PLANS[number].level:
            pytest.skip(f"{PLANS[number].name} is not to be had here, only {sandbox.info().isolation}")
        yield sandbox


def opened(client: SandboxClient, **limits: float) -> Session:
    values = {name: getattr(LIMITS, name) for name in Limits.__slots__} | limits
    return client.open_session(limits=Limits(**values), seed=5)


async def values(session: Session, *cells: str) -> list[str | None]:
    return [(await session.run(cell)).value for cell in cells]


def below(client: SandboxClient) -> list[psutil.Process]:
    return psutil.Process(client.process.pid).children(recursive=True)


async def kill_slots(client: SandboxClient) -> None:
    """With -9, that of every session there is."""
    for process in at_depth(client, slot_depth(client)):
        if children(process):  # slots that serve plain calls have none between them
            process.kill()
            assert await asyncio.to_thread(eventually, lambda gone=process: ended(gone))


# What stays


async def test_names_modules_and_functions_stay_from_cell_to_cell(client: SandboxClient) -> None:
    async with opened(client) as session:
        assert await values(session, "import math\nx = 3", "def f():\n    return x * 2", "f() + math.gcd(4, 6)") == [
            None,
            None,
            "8",
        ]


async def test_a_cell_is_answered_as_a_program_is(client: SandboxClient) -> None:
    async with opened(client) as session:
        response = await session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n'last'")
    assert (response.outcome, response.stdout, response.stderr) == (ProgramOutcome.OK, "out\n", "err\n")
    assert (response.value, response.exit_code, response.committed) == ("'last'", 0, True)
    assert response.isolation == client.info().isolation
    assert response.cpu_seconds > 0 and response.peak_memory_bytes > 0 and response.run_seconds > 0


async def test_an_error_keeps_what_was_there_and_what_the_cell_did_before_it(client: SandboxClient) -> None:
    async with opened(client) as session:
        await session.run("x = 1\ndef fail():\n    raise ValueError(x)")
        response = await session.run("y = 2\nfail()")
        assert response.outcome is ProgramOutcome.EXCEPTION and response.committed
        assert response.exception is not None and response.exception.type == "ValueError"
        assert "cell 1" in response.stderr and "cell 2" in response.stderr and "session_state" not in response.stderr
        assert await values(session, "x, y") == ["(1, 2)"]


async def test_files_stay_and_go_in_and_out(client: SandboxClient) -> None:
    raw = bytes(range(256))
    async with opened(client) as session:
        await session.run("1", files={"data/raw.bin": raw, "note.txt": "ä"})
        code = "raw = open('data/raw.bin', 'rb').read()\nopen('back.bin', 'wb').write(raw[::-1]);"
        response = await session.run(code, fetch=["back.bin", "note.txt", "missing", "data", "/etc/passwd", "../x"])
    assert dict(response.files) == {"back.bin": raw[::-1], "note.txt": "ä".encode()}


async def test_a_plain_call_takes_binary_files(client: SandboxClient) -> None:
    code = "open('a/b', 'rb').read(), open('c').read()"
    response = await client.run(Request(id="files", code=code, files={"a/b": b"\x00\xff", "c": "text"}))
    assert response.value == "(b'\\x00\\xff', 'text')"


async def test_random_numbers_go_on_and_are_those_of_the_seed(client: SandboxClient) -> None:
    cells = ["import random", "random.random()", "random.random()"]
    seen = []
    for _ in range(2):
        async with opened(client) as session:
            seen.append(await values(session, *cells))
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[0][2]


# What does not


async def test_a_discarded_cell_leaves_no_trace(client: SandboxClient) -> None:
    async with opened(client) as session:
        await session.run("import random\nx = [1]\nopen('kept', 'w').write('before');")
        wild = "x.append(2)\nrandom.random()\nopen('new', 'w').close()\nopen('kept', 'w').write('after');"
        response = await session.run(wild, commit=False)
        assert response.outcome is ProgramOutcome.OK and not response.committed
        assert await values(session, LISTING, "x, open('kept').read()") == ["['kept']", "([1], 'before')"]
        number = await values(session, "random.random()")
    async with opened(client) as other:
        assert number == (await values(other, "import random", "random.random()"))[1:]


@pytest.mark.parametrize(
    ("cell", "limits", "outcome"),
    [
        ("x = 2\nwhile True: pass", {"wall_seconds": 0.5}, ProgramOutcome.WALL_TIMEOUT),
        ("x = 2\nwhile True: pass", {"cpu_seconds": 1}, ProgramOutcome.CPU_TIMEOUT),
        ("x = 2\nwhile True: print('y' * 1000)", {"output_bytes": 5000}, ProgramOutcome.OUTPUT_LIMIT),
        ("x = 2\nb = bytearray(10**10)", {}, ProgramOutcome.MEMORY),
        ("x = 2\nimport os, signal\nsignal.raise_signal(signal.SIGSEGV)", {}, ProgramOutcome.SIGNAL),
        ("x = 2\nimport os\nos._exit(3)", {}, ProgramOutcome.EXIT_NONZERO),
    ],
)
async def test_a_cell_that_is_ended_leaves_the_state_as_it_was(
    client: SandboxClient, cell: str, limits: dict[str, float], outcome: ProgramOutcome
) -> None:
    if "raise_signal" in cell and client.info().isolation != "L3":
        cell = "x = 2\nimport ctypes\nctypes.string_at(0)"
    async with opened(client, **limits) as session:
        await session.run("x = 1\nopen('f', 'w').close()")
        response = await session.run(f"open('g', 'w').close()\n{cell}")
        assert response.outcome is outcome and not response.committed
        after = await session.run(f"{LISTING}, x")
        assert (after.value, after.replayed_cells) == ("(['f'], 1)", 0)


async def test_a_cancelled_cell_leaves_the_state_as_it_was(client: SandboxClient) -> None:
    async with opened(client) as session:
        await session.run("x = 1")
        cell = asyncio.create_task(session.run("x = 2\nimport time\ntime.sleep(15)"))
        await asyncio.sleep(0.3)
        cell.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cell
        assert await values(session, "x") == ["1"]


async def test_branches_do_not_see_each_other(client: SandboxClient) -> None:
    async with opened(client) as one:
        await one.run("import random\nx = [0]\nopen('f', 'w').write('0');")
        async with await one.branch() as two:
            for name, session in (("1", one), ("2", two)):
                await session.run(f"x.append({name})\nopen('f', 'w').write('{name}')\nopen('only{name}', 'w').close()")
            look = f"{LISTING}, x, open('f').read(), random.random()"
            first, second = await one.run(look), await two.run(look)
            assert first.value is not None and second.value is not None
            assert eval(first.value)[:3] == (["f", "only1"], [0, 1], "1")
            assert eval(second.value)[:3] == (["f", "only2"], [0, 2], "2")
            assert eval(first.value)[3] == eval(second.value)[3]
            assert (first.replayed_cells, second.replayed_cells) == (0, 0)


# When the paused processes are gone


async def test_a_killed_slot_is_replayed_with_the_same_values(client: SandboxClient) -> None:
    async with opened(client) as session:
        before = await values(session, "import random\nx = random.random()\nprint('loud')", "random.random()", "x")
        await session.run("open('f', 'w').write('kept')", files={"in": b"\xff"})
        await kill_slots(client)
        response = await session.run("x, open('f').read(), open('in', 'rb').read()")
        assert (response.outcome, response.replayed_cells, response.stdout) == (ProgramOutcome.OK, 4, "")
        assert response.value == f"({before[2]}, 'kept', b'\\xff')"
        assert (await session.run("x")).replayed_cells == 0


async def test_a_slot_killed_under_a_cell_is_replayed_and_the_cell_run_again(client: SandboxClient) -> None:
    async with opened(client) as session:
        await session.run("x = 1")
        cell = asyncio.create_task(session.run("import time\ntime.sleep(1)\nx + 1"))
        await asyncio.sleep(0.3)
        await kill_slots(client)
        response = await cell
        assert (response.outcome, response.value, response.replayed_cells) == (ProgramOutcome.OK, "2", 1)


async def test_a_cell_that_only_the_host_knows_to_be_committed_is_undone(client: SandboxClient) -> None:
    async with opened(client) as session:
        await session.run("x = 1")
        await session.run("x = 2")
        session.history.pop()  # as when it was cancelled while its answer was on the way
        response = await session.run("x")
        assert (response.value, response.replayed_cells) == ("1", 1)


async def test_a_killed_host_is_replaced_and_the_session_replayed() -> None:
    with SandboxClient.start(slots=1, preload=()) as client:
        async with opened(client) as session:
            await session.run("x = 1")
            client.process.kill()
            response = await session.run("x + 1")
            assert (response.value, response.replayed_cells) == ("2", 1)


def limited(**settings: float) -> SandboxClient:
    sandbox = SandboxClient(slots=2, preload=(), **settings)  # type: ignore[arg-type]  # one int, one float
    sandbox.launch()
    sandbox.await_hello()
    return sandbox


async def test_the_session_used_longest_ago_is_evicted_and_replayed() -> None:
    with limited(session_slots=2) as client:
        sessions = [opened(client) for _ in range(3)]
        for number, session in enumerate(sessions):
            await session.run(f"x = {number}")
        seen = [await session.run("x") for session in reversed(sessions)]
        assert [response.value for response in seen] == ["2", "1", "0"]
        assert [response.replayed_cells for response in seen] == [0, 0, 1]


async def test_an_idle_session_ends_and_is_replayed() -> None:
    with limited(session_idle_seconds=0.2) as client:
        async with opened(client) as session:
            await session.run("x = 1")
            before = len(below(client))
            assert await asyncio.to_thread(eventually, lambda: len(below(client)) < before)
            response = await session.run("x")
            assert (response.value, response.replayed_cells) == ("1", 1)


async def test_closing_ends_all_processes_of_a_session() -> None:
    with limited() as client:
        before = len(below(client))
        session = opened(client)
        branch = await session.branch()
        await session.run("x = 1")
        await branch.run("x = 2")
        await session.close()
        await branch.close()
        assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before)
        with pytest.raises(SandboxDown):
            await session.run("x")


# Hostile cells


# Bounded, children included: not every level limits the number of processes.
FORK_BOMB = """
import os, time
for _ in range(60):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
"""
FORGOTTEN = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
KILLER = """
import os, signal
for pid in (-1, os.getppid(), *range(2, 40)):
    try:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


@pytest.mark.parametrize("cell", [FORK_BOMB, DAEMON, FORGOTTEN], ids=["fork bomb", "daemon", "forgotten child"])
async def test_nothing_a_cell_started_outlives_it(client: SandboxClient, cell: str) -> None:
    async with opened(client, wall_seconds=5.0) as session:
        await session.run("x = 1")
        before = len([process for process in below(client) if not ended(process)])
        for _ in range(8):  # a parent that dies between two looks at it is a matter of microseconds
            await session.run(cell)
        alive = lambda: len([process for process in below(client) if not ended(process)])  # noqa: E731
        assert await asyncio.to_thread(eventually, lambda: alive() <= before)
        response = await session.run("x")
        assert (response.outcome, response.value) == (ProgramOutcome.OK, "1")


@pytest.mark.parametrize(
    "cell",
    [
        KILLER,
        "import os\nos.closerange(3, 256)",
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, bytes(10))\n    except OSError: pass",
        "import os\nos.fork = os.waitpid = None",
    ],
    ids=["kills all it can", "closes everything", "writes everywhere", "breaks the loop"],
)
async def test_a_cell_that_breaks_its_session_harms_no_other_and_can_be_undone(
    client: SandboxClient, cell: str
) -> None:
    if {"no_seccomp", "processes_signalable"} & set(client.info().failed_probes):
        pytest.skip("nothing here would keep the killing cell from processes outside")
    async with opened(client, wall_seconds=5.0) as victim, opened(client, wall_seconds=5.0) as session:
        await victim.run("y = 7")
        await session.run("x = 1")
        assert (await session.run(cell, commit=False)).outcome in ProgramOutcome
        response = await session.run("x")
        assert (response.outcome, response.value) == (ProgramOutcome.OK, "1")
        other = await victim.run("y")
        assert (other.value, other.replayed_cells) == ("7", 0)


async def test_a_committed_cell_that_breaks_its_session_is_told_as_our_fault_and_ends_nothing_else(
    client: SandboxClient,
) -> None:
    async with opened(client) as session:
        await session.run("import os\nos.fork = None")
        response = await session.run("1")
        assert response.outcome is ServiceOutcome.INTERNAL
    assert (await client.run(Request(id="after", code="1 + 1"))).value == "2"


async def test_sessions_see_neither_files_nor_processes_of_each_other(client: SandboxClient) -> None:
    async with opened(client) as one, opened(client) as two:
        await one.run("open('secret', 'w').write('s')\nimport os, time\npid = os.getpid()")
        look = f"{LISTING}, [pid for pid in range(1, 100) if os.path.exists(f'/proc/{{pid}}')]"
        response = await two.run(look)
        assert response.value is not None
        files, processes = eval(response.value)
        assert files == []
        if client.info().isolation == "L3":
            assert processes == []
        plain: Response = await client.run(Request(id="plain", code=LISTING))
        assert plain.value == "[]"


async def test_a_link_is_not_followed_out_of_the_working_directory(client: SandboxClient) -> None:
    async with opened(client) as session:
        cell = "import os, sys\nos.symlink(os.__file__, 'link')\nos.symlink('/', 'root')\nos.mkfifo('pipe')"
        response = await session.run(cell, fetch=["link", "root/etc/passwd", "pipe"])
        assert dict(response.files) == {}
        assert (await session.run("os.readlink('link') == os.__file__")).value == "True"
