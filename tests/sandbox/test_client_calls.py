"""One client over scripted daemons: what its caller gets when they answer, refuse, die, freeze and come back; and over
real ones: children that start, die, freeze and end with it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from rocstar.sandbox import wire
from rocstar.sandbox.call import (
    Call,
    DaemonInfo,
    DaemonSettings,
    Isolation,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
)
from rocstar.sandbox.call import SessionLost as Lost
from rocstar.sandbox.client import SandboxClient, run_once
from rocstar.sandbox.client.node import ChildConnection, service_at
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.scripted import ScriptedDaemon

WAIT_SECONDS = 60.0  # a bound on what would otherwise be forever


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(name="a") as daemon:
        yield daemon


@pytest.fixture
def pair() -> Iterator[tuple[ScriptedDaemon, ScriptedDaemon]]:
    with ScriptedDaemon(name="a") as one, ScriptedDaemon(name="b") as other:
        yield one, other


def connected(*daemons: ScriptedDaemon, silent_seconds: float = 30.0) -> SandboxClient:
    client = SandboxClient(daemons=0, silent_seconds=silent_seconds)
    for daemon in daemons:
        client._use(service_at(daemon.address, "", Isolation.L1))
    client.launch()
    client.await_hello()
    return client


async def run(client: SandboxClient, code: str, **values: Any) -> Response:
    return await asyncio.wait_for(client.run(Call(id=values.pop("id", "x"), code=code, **values)), WAIT_SECONDS)


def sent_calls(daemon: ScriptedDaemon, kind: FrameKind = FrameKind.CALL) -> list[int]:
    return [frame.number for frame in daemon.frames if frame.kind is kind]


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - other threads make it true
            await asyncio.sleep(0.01)


async def test_many_calls_at_once_get_each_its_own_answer_also_under_one_id(
    pair: tuple[ScriptedDaemon, ScriptedDaemon],
) -> None:
    with connected(*pair) as client:
        responses = await asyncio.gather(*(run(client, f"ok {n}", id=f"{n // 2}") for n in range(200)))
    assert [(each.id, each.stdout) for each in responses] == [(f"{n // 2}", f"ok {n}") for n in range(200)]
    assert all(len(daemon.calls) > 60 for daemon in pair)


@pytest.mark.parametrize(
    ("code", "outcome", "attempt"),
    [
        ("once internal", ProgramOutcome.OK, 2),
        ("once die", ProgramOutcome.OK, 2),
        ("once overloaded", ProgramOutcome.OK, 1),
        ("internal", ServiceOutcome.INTERNAL, 2),
    ],
)
async def test_what_a_daemon_of_one_does_to_a_call(
    daemon: ScriptedDaemon, code: str, outcome: ProgramOutcome, attempt: int
) -> None:
    with connected(daemon) as client:
        response = await run(client, code)
    assert (response.outcome, response.attempt) == (outcome, attempt)


UNREAD = "sent bytes that cannot be read"


@pytest.mark.parametrize(("code", "said"), [("die", "was lost"), ("garbage", UNREAD), ("deep", UNREAD)])
async def test_a_call_under_which_two_daemons_are_lost_is_not_sent_a_third_time(
    daemon: ScriptedDaemon, code: str, said: str
) -> None:
    with connected(daemon) as client:
        with pytest.raises(SandboxDown, match=said):
            await run(client, code)
        assert len(daemon.calls) == 2
        assert (await run(client, "ok")).outcome is ProgramOutcome.OK


async def test_the_daemons_that_are_left_take_the_calls_of_one_that_dies(
    pair: tuple[ScriptedDaemon, ScriptedDaemon],
) -> None:
    one, other = pair
    with connected(*pair) as client:
        calls = [asyncio.ensure_future(run(client, "hang" if n % 2 else "ok", id=f"{n}")) for n in range(100)]
        await until(lambda: len(one.calls) + len(other.calls) == 100)
        lost = {call.id for call in one.calls if call.code == "hang"}
        held = {call.id for call in other.calls}
        one.close()
        await until(lambda: len(other.calls) == len(held) + len(lost))
        assert len(lost) > 10 and {call.id for call in other.calls} == held | lost
        assert (await asyncio.gather(*calls[::2]))[0].outcome is ProgramOutcome.OK
        for call in calls[1::2]:
            call.cancel()


async def test_one_that_finds_no_room_anywhere_within_its_patience_is_overloaded(daemon: ScriptedDaemon) -> None:
    with connected(daemon) as client:
        response = await run(client, "overloaded", patience_seconds=0.4)
    assert response.outcome is ServiceOutcome.OVERLOADED
    patience = [call.patience_seconds for call in daemon.calls]
    assert len(patience) > 1 and patience == sorted(patience, reverse=True), "what is left of it goes along"


@pytest.mark.parametrize("text", ["\ud800", "x" * wire.MAX_FRAME_BYTES], ids=["no unicode", "too long"])
async def test_a_call_that_cannot_be_sent_is_rejected_and_harms_nobody(daemon: ScriptedDaemon, text: str) -> None:
    with connected(daemon) as client:
        response = await run(client, "ok", stdin=text, id="long")
        assert (response.id, response.outcome) == ("long", ProgramOutcome.REJECTED) and response.message
        assert (await run(client, "ok")).attempt == 1
    assert len(daemon.calls) == 1


async def test_cancelling_a_caller_tells_the_daemon(daemon: ScriptedDaemon) -> None:
    with connected(daemon) as client:
        task = asyncio.ensure_future(run(client, "hang"))
        await until(lambda: daemon.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: sent_calls(daemon, FrameKind.CANCEL))
        assert sent_calls(daemon, FrameKind.CANCEL) == sent_calls(daemon)
        assert not client.nodes[0].held


async def test_a_client_outlives_event_loops_and_what_they_left_disturbs_no_other(daemon: ScriptedDaemon) -> None:
    def leave() -> None:
        loop = asyncio.new_event_loop()
        left = loop.create_task(client.run(Call(id="left", code="wait")))
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()
        assert not left.done()

    with connected(daemon) as client:
        await asyncio.to_thread(leave)
        daemon.hold.set()
        for _ in range(3):
            response = await asyncio.to_thread(lambda: asyncio.run(run(client, "ok", id="new")))
            assert (response.id, response.attempt) == ("new", 1)
        daemon.drop()
        assert (await run(client, "ok")).outcome is ProgramOutcome.OK
        assert not client.nodes[0].held


async def test_more_than_a_socket_holds_goes_out_in_order(daemon: ScriptedDaemon) -> None:
    with connected(daemon) as client:
        calls = [run(client, "ok", id=f"{n}", stdin=chr(97 + n) * 500_000) for n in range(20)]
        assert len(await asyncio.gather(*calls)) == 20
    assert [call.stdin for call in daemon.calls] == [chr(97 + n) * 500_000 for n in range(20)]


async def test_a_daemon_that_lost_a_call_and_answers_pings_is_given_up(daemon: ScriptedDaemon) -> None:
    with connected(daemon, silent_seconds=0.3) as client:
        lost, fine = await asyncio.gather(run(client, "once hang", id="lost"), run(client, "ok", id="fine"))
        assert (lost.outcome, lost.attempt) == (ProgramOutcome.OK, 2) and fine.attempt == 1
        with pytest.raises(SandboxDown, match="lost a call that it holds, has nothing to do and was given up"):
            await run(client, "hang", id="again")


async def test_the_result_of_another_call_is_nobodys(daemon: ScriptedDaemon) -> None:
    with connected(daemon) as client:
        assert (await run(client, "once another")).stdout == "once another"
        refused = await run(client, "another", id="y")
    assert refused.outcome is ServiceOutcome.INTERNAL and "the result of another call, 'another'" in refused.message
    assert [call.code for call in daemon.calls] == ["once another"] * 2 + ["another"] * 2, "each is sent once more"


async def test_a_caller_whose_own_loop_stood_still_blames_nobody(daemon: ScriptedDaemon) -> None:
    with connected(daemon, silent_seconds=0.3) as client:
        task = asyncio.ensure_future(run(client, "hang"))
        await until(lambda: daemon.calls)
        time.sleep(1.0)  # noqa: ASYNC251 - standing still is the point
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.nodes[0].up
        task.cancel()


async def test_what_is_passed_on_for_another_client_is_sent_once(daemon: ScriptedDaemon) -> None:
    with connected(daemon) as client:
        assert (await client.run(Call(id="theirs", code="ok"), again=False)).id == "theirs"
        internal = await client.run(Call(id="theirs", code="internal"), again=False)
        assert internal.outcome is ServiceOutcome.INTERNAL
        with pytest.raises(SandboxDown, match="was lost"):
            await client.run(Call(id="theirs", code="die"), again=False)
    assert [call.code for call in daemon.calls] == ["ok", "internal", "die"], "nothing is sent again"


async def test_cells_that_are_passed_on_stay_with_their_session(pair: tuple[ScriptedDaemon, ScriptedDaemon]) -> None:
    def cell(number: int) -> Call:
        return Call(id=f"{number}", code="ok", session="s", cell=number)

    with connected(*pair) as client:
        with pytest.raises(Lost):
            await client.run(cell(5), again=False)
        outcomes = [(await client.run(cell(number), again=False)).outcome for number in range(1, 12)]
        assert set(outcomes) == {ProgramOutcome.OK}
        assert sorted(len(daemon.sessions) for daemon in pair) == [0, 1]
        home = next(daemon for daemon in pair if daemon.sessions)
        client.close_session("s")
        await until(lambda: sent_calls(home, FrameKind.CLOSE))
        with pytest.raises(Lost):
            await client.run(Call(id="x", code="die", session="t", cell=1), again=False)


async def test_without_a_daemon_a_call_is_given_up() -> None:
    with SandboxClient.connect([]) as client, pytest.raises(SandboxDown, match="there is no sandbox node"):
        await run(client, "ok")


def test_several_daemons_are_told_as_one() -> None:
    weak = DaemonInfo(isolation=Isolation.L1, slots=5, failed_probes=("no_memory_cgroup",))
    with ScriptedDaemon() as one, ScriptedDaemon(weak) as other, connected(one, other) as client:
        told = client.info()
        assert (told.isolation, told.slots, told.failed_probes) == (Isolation.L1, 7, ("no_memory_cgroup",))
        for node in client.nodes:
            node.up, node.problem = False, f"{node.label} was lost: it died"
        with pytest.raises(SandboxDown, match=f"^{one.address} was lost: it died; {other.address} was lost: it died$"):
            client.info()
    with pytest.raises(SandboxDown, match="no sandbox daemon has started"):
        SandboxClient(daemons=0).info()


def test_an_address_where_nobody_is_is_told() -> None:
    with pytest.raises(SandboxDown, match="refused"):
        SandboxClient.connect(["http://127.0.0.1:9"])


@pytest.mark.parametrize(
    "address", ["ftp://x", "x", "unix:/x", "http://", "http://h:port", "http://h/path", "https://h"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SandboxDown, match="is no address of a sandbox"):
        SandboxClient.connect([address])


NAP = "import time\ntime.sleep(0.5)\n'done'"


@contextmanager
def started(daemons: int = 1, silent_seconds: float = 30.0, **settings: Any) -> Iterator[SandboxClient]:
    values = DaemonSettings(**{"slots": 2, "preload": ()} | settings)
    with SandboxClient(values, daemons=daemons, silent_seconds=silent_seconds) as client:
        client.launch()
        client.await_hello()
        yield client


def process(client: SandboxClient, number: int = 0) -> psutil.Process:
    connection = client.nodes[number].connection
    assert isinstance(connection, ChildConnection)
    return psutil.Process(connection.process.pid)


async def ended(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=WAIT_SECONDS)
    assert not alive


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_child_that_dies_or_freezes_is_replaced_and_its_calls_run_again(how: signal.Signals) -> None:
    with started(silent_seconds=1.0) as client:
        first = process(client)
        family = [first, *first.children(recursive=True)]
        calls = [asyncio.ensure_future(run(client, NAP)) for _ in range(4)]
        await asyncio.sleep(0.2)
        first.send_signal(how)
        responses = await asyncio.gather(*calls)
        assert {each.value for each in responses} == {"'done'"} and max(each.attempt for each in responses) == 2
        assert process(client).pid != first.pid
        await ended(family)


async def test_a_busy_child_that_says_nothing_is_left_alone_and_one_that_froze_between_calls_is_replaced() -> None:
    with started(silent_seconds=1.0) as client:
        first = process(client)
        response = await run(client, "import time; time.sleep(1.5)")
        assert response.attempt == 1 and process(client).pid == first.pid
        assert client.usage().cpu_seconds > 0
        first.send_signal(signal.SIGSTOP)
        assert (await run(client, "1")).value == "1"


async def test_closing_ends_the_daemon_and_all_below_it() -> None:
    with started(daemons=2) as client:
        task = asyncio.ensure_future(run(client, "import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        family = [each for n in (0, 1) for each in [process(client, n), *process(client, n).children(recursive=True)]]
    with pytest.raises(SandboxDown, match="was closed"):
        await task
    with pytest.raises(SandboxDown, match="is closed"):
        await run(client, "1")
    client.close()
    await ended(family)


async def test_a_client_that_was_never_launched_starts_its_daemon_at_the_first_call() -> None:
    with SandboxClient(DaemonSettings(slots=1, preload=("no_such_module",))) as client:
        for _ in range(2):
            with pytest.raises(SandboxDown, match="no_such_module"):
                await run(client, "1")
    with SandboxClient(DaemonSettings(slots=1, preload=())) as client:
        assert (await run(client, "1")).value == "1"


def test_one_program_alone() -> None:
    response = run_once("print(input())\n7", stdin="hello\n")
    assert (response.stdout, response.value) == ("hello\n", "7")
