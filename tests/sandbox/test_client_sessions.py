"""A session as its caller sees it, over a scripted daemon: what is sent, what is replayed, what is said to be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rocstar.sandbox.call import DaemonSettings, Limits, ProgramOutcome, SandboxDown, ServiceOutcome, SessionLost
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import FrameKind
from tests.sandbox.driver import eventually
from tests.sandbox.scripted import ScriptedDaemon


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: ScriptedDaemon) -> Iterator[SandboxClient]:
    with SandboxClient.connect([daemon.address]) as client:
        yield client


def sent(daemon: ScriptedDaemon) -> list[tuple[int, str]]:
    return [(call.cell, call.code) for call in daemon.calls]


async def test_cells_are_numbered_and_carry_what_they_were_given(client: SandboxClient, daemon: ScriptedDaemon) -> None:
    async with client.open_session(limits=Limits(wall_seconds=3.0), seed=7) as session:
        await session.run("ok 1", files={"a": b"1"}, fetch=["b"], patience_seconds=9.0)
        await session.run("ok 2", wall_seconds=1.0)
    first, second = daemon.calls
    assert (first.cell, first.seed, first.files, first.fetch) == (1, 7, {"a": b"1"}, ("b",))
    assert (first.session, first.limits.wall_seconds, second.limits.wall_seconds) == (second.session, 3.0, 1.0)
    assert (second.cell, second.seed, second.files, second.fetch) == (2, 7, {}, ())
    assert 0 < first.patience_seconds <= 9.0 and second.patience_seconds > 3000
    assert await asyncio.to_thread(eventually, lambda: daemon.frames[-1].kind is FrameKind.CLOSE)


async def test_a_session_without_a_seed_draws_one_and_keeps_it(client: SandboxClient, daemon: ScriptedDaemon) -> None:
    for session in (client.open_session(), client.open_session()):
        await session.run("ok")
        await session.run("ok")
    seeds = [call.seed for call in daemon.calls]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


async def test_without_replay_a_lost_session_is_told_once_and_then_starts_afresh(
    client: SandboxClient, daemon: ScriptedDaemon
) -> None:
    session = client.open_session()
    await session.run("ok 1")
    daemon.sessions.clear()
    with pytest.raises(SessionLost, match="names and files are gone"):
        await session.run("ok 2")
    assert (await session.run("ok 3")).replayed_cells == 0
    assert sent(daemon) == [(1, "ok 1"), (2, "ok 2"), (1, "ok 3")]


@pytest.mark.parametrize("how", ["forgotten", "dead"])
async def test_with_replay_the_cells_before_are_run_again(
    client: SandboxClient, daemon: ScriptedDaemon, how: str
) -> None:
    session = client.open_session(replay=True, seed=3)
    await session.run("ok 1", files={"a": b"1"})
    await session.run("ok 2")
    if how == "forgotten":
        daemon.sessions.clear()
    response = await session.run("once die" if how == "dead" else "ok 3")
    assert (response.outcome, response.replayed_cells) == (ProgramOutcome.OK, 2)
    (tried, *again) = daemon.calls[2:]
    assert [(call.cell, call.code) for call in again] == [(1, "ok 1"), (2, "ok 2"), (3, tried.code)]
    assert again[0].files == {"a": b"1"} and {call.seed for call in again} == {3}
    assert (await session.run("ok 4")).replayed_cells == 0
    assert sent(daemon)[-1] == (4, "ok 4")


async def test_state_that_a_cell_lost_by_its_own_doing_is_never_replayed(
    client: SandboxClient, daemon: ScriptedDaemon
) -> None:
    session = client.open_session(replay=True)
    await session.run("ok 1")
    lost = await session.run("state_lost")
    assert (lost.outcome, lost.state_lost) == (ProgramOutcome.WALL_TIMEOUT, True)
    await session.run("ok 2")
    daemon.sessions.clear()
    assert (await session.run("ok 3")).replayed_cells == 1
    assert sent(daemon)[2:] == [(1, "ok 2"), (2, "ok 3"), (1, "ok 2"), (2, "ok 3")]


async def test_a_cell_that_was_not_run_is_not_counted(client: SandboxClient, daemon: ScriptedDaemon) -> None:
    session = client.open_session(replay=True)
    assert (await session.run("\ud800")).outcome is ProgramOutcome.REJECTED
    assert (await session.run("overloaded", patience_seconds=0.0)).outcome is ServiceOutcome.OVERLOADED
    assert (await session.run("ok")).outcome is ProgramOutcome.OK
    assert sent(daemon)[-1] == (1, "ok")


async def test_cells_asked_for_together_run_in_their_order(client: SandboxClient, daemon: ScriptedDaemon) -> None:
    session = client.open_session()
    await asyncio.gather(*(session.run(f"ok {n}") for n in range(1, 6)))
    assert sent(daemon) == [(n, f"ok {n}") for n in range(1, 6)]


async def test_a_closed_session_runs_nothing_and_closes_once(client: SandboxClient, daemon: ScriptedDaemon) -> None:
    session = client.open_session()
    await session.close()
    await session.close()
    with pytest.raises(SandboxDown, match="closed"):
        await session.run("ok")
    assert daemon.frames == []


@pytest.mark.parametrize(
    ("why", "told"),
    [("state_lost", "wall_timeout"), ("overloaded", "overloaded"), ("closed", "its session was closed")],
)
async def test_a_replay_that_is_broken_off_is_told_and_the_cell_at_hand_is_not_run(
    client: SandboxClient, daemon: ScriptedDaemon, why: str, told: str
) -> None:
    session = client.open_session(replay=True)
    await session.run("ok 1")
    await session.run(f"second {why}", patience_seconds=0.0)
    daemon.sessions.clear()
    with pytest.raises(SandboxDown, match=rf"a cell of it could not be run again \({told}\)"):
        await session.run("ok 3")
    assert sent(daemon)[3:] == [(1, "ok 1"), (2, f"second {why}")]
    again = await session.run("ok 3")
    assert again.replayed_cells == (0 if why == "state_lost" else 1), "it goes on where it was broken off"


async def test_a_session_that_waits_for_room_ends_no_idle_one() -> None:
    with SandboxClient(DaemonSettings(slots=1, session_slots=1, preload=())) as client:
        client.launch()
        client.await_hello()
        one, other = (client.open_session(replay=True, waits=True) for _ in range(2))
        await one.run("x = 1")
        waiting = asyncio.create_task(other.run("2"))
        await asyncio.sleep(0)
        assert (await one.run("x")).replayed_cells == 0
        assert not waiting.done()
        await one.close()
        assert (await waiting).value == "2"
