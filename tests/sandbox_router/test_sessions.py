"""Sessions over a router: cells follow their session to its node, and its history goes elsewhere when that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rocstar.sandbox.router.homes import Homes
from rocstar.sandbox.router.local import LocalCluster
from rocstar.sandbox.router.nouns import Node, Policy
from rocstar.sandbox.session import Session, SessionLost
from rocstar.sandbox.wire import Limits, ProgramOutcome, Response, SandboxDown
from tests.sandbox_router.support import assert_all_right, request, until

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=20.0)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    policy = Policy(silent_seconds=1.5, reconnect_seconds=0.5)
    with LocalCluster.start(nodes=2, slots=2, preload=(), policy=policy) as cluster:
        yield cluster


def opened(cluster: LocalCluster, seed: int = 5) -> Session:
    return cluster.open_session(limits=LIMITS, seed=seed)


def home_of(cluster: LocalCluster, session: Session) -> Node:
    return cluster.router.state.nodes[cluster.router.homes.nodes[session.key]]


def process_of(cluster: LocalCluster, node: Node) -> int:
    return next(child.process.pid for child in cluster.children if child.label == node.label)


async def test_cells_follow_their_session_while_other_calls_go_everywhere(cluster: LocalCluster) -> None:
    sessions = [opened(cluster) for _ in range(4)]
    for session in sessions:  # one by one, the node that is idle longest comes next
        await session.run("seen = []")
    for number in range(5):
        cells = [session.run(f"seen.append({number}); seen") for session in sessions]
        plain = [cluster.run(request(f"c{n} = {n}; print('c{n}')", number=n)) for n in range(20)]
        responses = await asyncio.gather(*cells, *plain)
        assert {each.value for each in responses[:4]} == {str(list(range(number + 1)))}
        assert {each.replayed_cells for each in responses} == {0}
        assert {each.stdout.strip() for each in responses[4:]} == {f"c{n}" for n in range(20)}
        by_session = [home_of(cluster, session).label for session in sessions]
        assert [each.node for each in responses[:4]] == by_session
    assert {node.label for node in (home_of(cluster, session) for session in sessions)} == {"node0", "node1"}
    for session in sessions:
        await session.close()
    assert not cluster.router.homes.nodes


async def test_files_branches_and_undone_cells_work_as_in_one_sandbox(cluster: LocalCluster) -> None:
    async with opened(cluster) as session:
        raw = bytes(range(256))
        response = await session.run("x = 1", files={"raw": raw}, fetch=["raw"])
        assert dict(response.files) == {"raw": raw}
        assert not (await session.run("x = 2", commit=False)).committed
        branch = await session.branch()
        assert (await session.run("x += 10; x")).value == "11"
        told = await branch.run("x += 100; x")
        assert (told.value, told.replayed_cells, told.id) == ("101", 0, "cell")
        assert home_of(cluster, branch) is home_of(cluster, session)
        await branch.close()


async def test_a_session_whose_node_is_killed_goes_on_elsewhere_with_its_past(cluster: LocalCluster) -> None:
    async with opened(cluster) as session:
        await session.run("import random\nx = random.random()")
        before = (await session.run("x")).value
        killed = home_of(cluster, session)
        os.kill(process_of(cluster, killed), signal.SIGKILL)
        response = await session.run("x")
        assert (response.value, response.outcome) == (before, ProgramOutcome.OK)
        assert response.replayed_cells == 2 and response.node != killed.label
        after = await session.run("x")
        assert (after.value, after.replayed_cells, after.node) == (before, 0, response.node)


async def test_a_cell_that_runs_when_its_node_is_killed_is_answered_once(cluster: LocalCluster) -> None:
    async with opened(cluster) as session:
        await session.run("runs = 0")
        cell = asyncio.create_task(session.run("import time; time.sleep(1.0); runs += 1; runs"))
        await asyncio.sleep(0.3)
        os.kill(process_of(cluster, home_of(cluster, session)), signal.SIGKILL)
        assert (await cell).value == "1"
        assert (await session.run("runs")).value == "1"


async def test_many_sessions_and_calls_survive_the_death_of_a_node(cluster: LocalCluster) -> None:
    sessions = [opened(cluster) for _ in range(6)]

    async def play(session: Session) -> list[str | None]:
        cells = ["n = 0", *["import time; time.sleep(0.05); n += 1; n"] * 8]
        return [(await session.run(cell)).value for cell in cells]

    plain = [cluster.run(request(f"import time; time.sleep(0.02); print('c{n}', end='')", number=n)) for n in range(60)]
    playing = asyncio.gather(*map(play, sessions))
    calls = asyncio.gather(*plain)
    await asyncio.sleep(0.4)
    os.kill(cluster.children[0].process.pid, signal.SIGKILL)
    assert await playing == [[None, *(str(n) for n in range(1, 9))]] * 6
    assert_all_right(list(await calls))
    for session in sessions:
        await session.close()


async def test_a_frozen_node_that_thaws_later_changes_nothing(cluster: LocalCluster) -> None:
    async with opened(cluster) as session:
        await session.run("n = 0")
        frozen = home_of(cluster, session)
        pid = process_of(cluster, frozen)
        os.kill(pid, signal.SIGSTOP)
        try:
            response = await session.run("n += 1; n")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (response.value, response.node != frozen.label) == ("1", True)
        await until(lambda: sum(node.connected for node in cluster.nodes()) == 2)
        await until(lambda: not any(node.held for node in cluster.nodes()))
        assert (await session.run("n += 1; n")).value == "2"


async def test_cancelling_a_cell_ends_it_on_its_node(cluster: LocalCluster) -> None:
    async with opened(cluster) as session:
        await session.run("x = 1")
        cell = asyncio.create_task(session.run("x = 2\nwhile True: pass"))
        await asyncio.sleep(0.3)
        cell.cancel()
        await asyncio.gather(cell, return_exceptions=True)
        async with asyncio.timeout(10):
            assert (await session.run("x")).value == "1"


async def test_a_session_of_a_closed_cluster_says_so(cluster: LocalCluster) -> None:
    session = opened(cluster)
    await session.run("1")
    cluster.close()
    with pytest.raises(SandboxDown, match="closed"):
        await session.run("2")
    await session.close()


# Where sessions live


class Nodes:
    """Answers for all nodes, and remembers."""

    def __init__(self, *alive: str) -> None:
        self.alive = set(alive)
        self.sent: list[tuple[str, str]] = []
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.next = iter(alive)
        self.homes = Homes(self.send, lambda name, message: self.told.append((name, message)), self.alive.__contains__)

    async def send(self, message: Mapping[str, Any], node: str) -> tuple[Response, str]:
        self.sent.append((message["session"], node))
        return Response(id="", outcome=ProgramOutcome.OK), node or next(self.next)


def cell(session: str, cells: int, **more: Any) -> dict[str, Any]:
    return {"kind": "cell", "session": session, "cells": cells, **more}


async def test_the_first_cell_goes_anywhere_and_the_next_where_it_went() -> None:
    nodes = Nodes("a", "b")
    await nodes.homes.call(cell("s", 0))
    await nodes.homes.call(cell("s", 1))
    assert nodes.sent == [("s", ""), ("s", "a")]


async def test_a_cell_without_its_node_is_lost_before_it_is_sent() -> None:
    nodes = Nodes("a", "b")
    await nodes.homes.call(cell("s", 0))
    nodes.alive.clear()
    with pytest.raises(SessionLost):
        await nodes.homes.call(cell("s", 1))
    await nodes.homes.call(cell("s", 1, history=[{}]))
    assert nodes.sent == [("s", ""), ("s", "")]
    assert nodes.told == [("a", {"kind": "close", "session": "s"})], "the old node need not keep it"


async def test_branching_and_closing_are_told_to_the_node_it_lives_in() -> None:
    nodes = Nodes("a", "b")
    await nodes.homes.call(cell("s", 0))
    branch = {"kind": "branch", "session": "s", "new": "t"}
    nodes.homes.tell(branch)
    await nodes.homes.call(cell("t", 1))
    nodes.homes.tell({"kind": "close", "session": "s"})
    nodes.homes.tell({"kind": "close", "session": "s"})
    assert nodes.sent[-1] == ("t", "a")
    assert nodes.told == [("a", branch), ("a", {"kind": "close", "session": "s"})]


async def test_sessions_that_nobody_closed_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.sandbox.router.homes.MAX_HOMES", 2)
    nodes = Nodes("a", "b", "c")
    for session in "xyz":
        await nodes.homes.call(cell(session, 0))
    assert dict(nodes.homes.nodes) == {"y": "b", "z": "c"}
