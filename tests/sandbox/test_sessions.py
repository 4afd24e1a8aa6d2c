"""Notebooks as paused processes: what a cell leaves, what an undone one does not, and what comes of killed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import ProgramOutcome, Request, SandboxDown
from tests.sandbox.support import at_depth, children, ended, eventually, slot_depth
from tests.sandbox.ways import LISTING, NAMES, WAYS, below, opened, started, values


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def client(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    yield from started(request.param)


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


async def test_a_daemon_thread_ends_with_its_cell_and_random_numbers_go_on_beside_it(client: SandboxClient) -> None:
    start = "import random, threading, time\n"
    thread = "t = threading.Thread(target=time.sleep, args=(60,), daemon=True)\nt.start()"
    async with opened(client) as plain, opened(client) as threaded:
        expected = await values(plain, start, "random.random()", "random.random()")
        seen = await values(threaded, start + thread, "random.random()", "random.random()")
        assert seen == expected
        assert await values(threaded, "threading.active_count(), t.is_alive()") == ["(1, False)"]


async def test_a_fork_that_a_cell_makes_draws_random_numbers_of_its_own(client: SandboxClient) -> None:
    cell = """
import os, random
source, sink = os.pipe()
if os.fork() == 0:
    os.write(sink, str(random.random()).encode())
    os._exit(0)
os.read(source, 100).decode() == str(random.random())
"""
    async with opened(client) as session:
        assert await values(session, cell, cell) == ["False", "False"]


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
    if "raise_signal" in cell and client.info().isolation < "L3":
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


async def test_closing_ends_all_that_a_session_has_started(client: SandboxClient) -> None:
    async with opened(client) as first:
        await first.run("1")
    before = len(below(client))  # a slot that waits for the next session among them
    session = opened(client)
    branch = await session.branch()
    await session.run("x = 1")
    await branch.run("x = 2")
    await session.close()
    await branch.close()
    assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before + 3)
    with pytest.raises(SandboxDown):
        await session.run("x")


async def test_a_slot_that_no_session_has_taken_ends_when_it_is_old() -> None:
    with limited(session_idle_seconds=0.2) as client:
        before = len(below(client))
        async with opened(client) as session:
            await session.run("x = 1")
        assert await asyncio.to_thread(eventually, lambda: len(below(client)) <= before)


async def test_one_session_after_another_starts_from_nothing_whatever_its_limits(client: SandboxClient) -> None:
    seen = set()
    for seconds in (1.0, 20.0, 2.0):
        async with opened(client, wall_seconds=seconds, cpu_seconds=seconds) as session:
            look = f"{LISTING}, os.getcwd(), 'x' in globals(), 'probe' in sys.modules, random.random()"
            response = await session.run(f"import os, random, sys\n{look}", fetch=["probe.py"])
            assert response.value is not None and response.files == {}
            assert "[], " in response.value and "False, False" in response.value
            seen.add(response.value)
            await session.run("open('probe.py', 'w').close()\nimport probe\nx = 1\nos.mkdir('d')\nos.chdir('d')")
            await session.run("os.chmod('/tmp', 0o700)")
    assert len(seen) == 1
