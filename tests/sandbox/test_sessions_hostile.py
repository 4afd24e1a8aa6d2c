"""What the cells of a hostile session cannot do: outlive themselves, harm other sessions, reach files outside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.linux import read_max_pid
from rocstar.sandbox.wire import ProgramOutcome, Request, Response, ServiceOutcome
from tests.sandbox.support import eventually
from tests.sandbox.ways import LISTING, NAMES, WAYS, below, opened, started


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    yield from started(request.param)


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
# Children of the slot, not of the cell.
SIBLINGS = """
import ctypes, os, platform, signal, time
clone, CLONE_PARENT = {"x86_64": 56, "aarch64": 220}[platform.machine()], 0x8000
for _ in range(3):
    if ctypes.CDLL(None).syscall(clone, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(60)
        os._exit(0)
"""
# Makes the kernel's process numbers begin anew, with a child here and there that is in no group with the cell.
ANEW = """
import _thread, os, time
def child():
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
for n in range(MAX_PID * 5 // 4):
    if n % (MAX_PID // 4) == 0:
        child()
    ended = _thread.allocate_lock()
    ended.acquire()
    _thread.start_new_thread(ended.release, ())
    ended.acquire()
"""
KILLER = """
import os, signal
for pid in (-1, os.getppid(), *range(2, 40)):
    try:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


HARD_TO_FIND = {"fork bomb": FORK_BOMB, "daemon": DAEMON, "forgotten child": FORGOTTEN, "siblings": SIBLINGS}


@pytest.mark.parametrize("cell", HARD_TO_FIND.values(), ids=HARD_TO_FIND)
async def test_nothing_a_cell_started_outlives_it(client: SandboxClient, cell: str) -> None:
    async with opened(client, wall_seconds=5.0) as session:
        await session.run("x = 1")
        before = len(below(client))
        for _ in range(8):  # a parent that dies between two looks at it is a matter of microseconds
            await session.run(cell)
        assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before)
        response = await session.run("x")
        assert (response.outcome, response.value) == (ProgramOutcome.OK, "1")


async def test_children_are_found_when_the_numbers_of_processes_begin_anew(client: SandboxClient) -> None:
    max_pid = read_max_pid()
    if max_pid > 2**15:
        pytest.skip(f"to use up {max_pid} process numbers would take too long")
    async with opened(client, wall_seconds=60.0, cpu_seconds=50.0) as session:
        await session.run("x = 1")
        before = len(below(client))
        response = await session.run(ANEW.replace("MAX_PID", str(max_pid)))
        assert (response.outcome, response.committed) == (ProgramOutcome.OK, True)
        assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before)
        response = await session.run("x")
        assert (response.value, response.replayed_cells) == ("1", 0)


async def test_siblings_that_a_plain_program_makes_for_itself_do_not_outlive_it(client: SandboxClient) -> None:
    await client.run(Request(id="before", code="1"))
    before = len(below(client))
    for _ in range(3):
        await client.run(Request(id="siblings", code=SIBLINGS))
    assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before)


@pytest.mark.parametrize(
    "cell",
    [
        KILLER,
        "import os\nos.closerange(3, 256)",
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, bytes(10))\n    except OSError: pass",
        "import os, marshal\nos.fork = os.waitpid = marshal.loads = None",
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


# The first state lives on when its session is closed, and the next session is a fork of it.
LEGACIES = {
    "signals": """
import os, signal
for pid in range(2, 40):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMIN, signal.SIGINT, signal.SIGCONT):
        try:
            if pid != os.getpid():
                os.kill(pid, number)
        except OSError:
            pass
""",
    "kills": KILLER,
    "niceness": """
import os
for pid in range(2, 40):
    try:
        os.setpriority(os.PRIO_PROCESS, pid, 15)
    except OSError:
        pass
""",
    "files": "import os\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)\nos.chmod('.', 0)",
}


@pytest.mark.parametrize("cell", LEGACIES.values(), ids=LEGACIES)
async def test_what_a_session_does_to_its_slot_does_not_reach_the_next(client: SandboxClient, cell: str) -> None:
    if client.info().isolation < "L3":
        pytest.skip("without namespaces no slot serves two sessions")
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(3):
        async with opened(client, wall_seconds=5.0) as session:
            await session.run(cell)
        async with opened(client, wall_seconds=5.0) as heir:
            response = await heir.run(f"{LISTING}, os.getpriority(os.PRIO_PROCESS, 0)")
            assert (response.outcome, response.value) == (ProgramOutcome.OK, f"([], {ordinary})")


async def test_a_cell_holds_no_descriptor_but_its_own(client: SandboxClient) -> None:
    code = """
import os
held = []
for fd in range(512):
    try:
        os.fstat(fd)
        held.append(fd)
    except OSError:
        pass
held
"""
    async with opened(client) as session:
        assert (await session.run(code)).value == (await session.run(code)).value == "[0, 1, 2, 250]"


async def test_a_committed_cell_that_breaks_its_session_is_told_as_our_fault_and_ends_nothing_else(
    client: SandboxClient,
) -> None:
    async with opened(client) as session:
        await session.run("import marshal\nmarshal.loads = None")
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
        if client.info().isolation >= "L3":
            assert processes == []
        plain: Response = await client.run(Request(id="plain", code=LISTING))
        assert plain.value == "[]"


async def test_a_link_is_not_followed_out_of_the_working_directory(client: SandboxClient) -> None:
    async with opened(client) as session:
        cell = "import os, sys\nos.symlink(os.__file__, 'link')\nos.symlink('/', 'root')\nos.mkfifo('pipe')"
        response = await session.run(cell, fetch=["link", "root/etc/passwd", "pipe"])
        assert dict(response.files) == {}
        assert (await session.run("os.readlink('link') == os.__file__")).value == "True"
