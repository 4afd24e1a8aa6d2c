"""Connections between router and nodes: broken, shared, refused, and strangers at the door; the wire is real."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from rocstar.sandbox.router.agent import NodeAgent
from rocstar.sandbox.router.link import HEADER, Link
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.router.uplink import Refused
from rocstar.sandbox.router.work import SandboxWork
from rocstar.sandbox.wire import SandboxDown
from tests.sandbox_router.support import (
    TOKEN,
    PretendSandbox,
    Recorder,
    assert_all_right,
    request,
    router_with,
    run_many,
    until,
)


async def test_results_made_while_the_connection_was_broken_are_given_back() -> None:
    runner = Recorder(slots=10)
    async with router_with(runner, policy=Policy(reconnect_seconds=20.0), through=True) as (router, (agent,), proxy):
        calls = asyncio.create_task(run_many(router, 10))
        await until(lambda: len(runner.asked) == 10)
        proxy.cut()
        await until(lambda: agent.uplinks[0].link is None)
        runner.go.set()
        await until(lambda: len(runner.ended) == 10)
        proxy.mend()
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {1} and len(runner.asked) == 10
        await until(lambda: not agent.uplinks[0].records)


async def test_a_node_that_returns_too_late_delivers_nothing_twice() -> None:
    slow, fast = Recorder(slots=10), PretendSandbox()
    policy = Policy(reconnect_seconds=0.1)
    async with router_with(slow, policy=policy, through=True) as (router, (late,), proxy):
        calls = asyncio.create_task(run_many(router, 10))
        await until(lambda: len(slow.asked) == 10)
        proxy.cut()
        other = NodeAgent(SandboxWork(fast), routers=[router.address], token=TOKEN, label="other")
        serving = asyncio.create_task(other.serve())
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {2}
        proxy.mend()
        await until(lambda: len(slow.ended) == 10 and not late.uplinks[0].records)
        assert not router.state.calls and all(not node.held for node in router.nodes())
        serving.cancel()
        other.uplinks[0].hang_up()


async def test_connections_that_break_all_the_time_lose_nothing() -> None:
    rng = random.Random(3)
    policy = Policy(reconnect_seconds=0.3, max_attempts=50)
    async with router_with(PretendSandbox(), PretendSandbox(), policy=policy, through=True) as (router, _, proxy):
        calls = asyncio.create_task(run_many(router, 600))
        while not calls.done():
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            proxy.cut()
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            proxy.mend()
        assert_all_right(await calls)


async def test_a_node_serves_two_routers_and_tells_each_of_the_other() -> None:
    runner = Recorder(slots=4)
    async with router_with(runner) as (first, _, _), router_with() as (second, _, _):
        shared = NodeAgent(SandboxWork(runner), routers=[first.address, second.address], token=TOKEN, label="shared")
        serving = asyncio.create_task(shared.serve())
        await second.wait_for_nodes(1, seconds=10.0)
        call = asyncio.create_task(second.run(request("from the second")))
        await until(lambda: any(node.label == "shared" and node.others == 1 for node in first.nodes()))
        runner.go.set()
        assert (await call).stdout == "from the second"
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for uplink in shared.uplinks:
            uplink.hang_up()


async def test_a_node_that_leaves_finishes_what_it_has_and_gets_nothing_more() -> None:
    staying, leaving = Recorder(slots=1), Recorder(slots=1)
    async with router_with(leaving, staying, capacity=1) as (router, (agent, _), _):
        calls = asyncio.create_task(run_many(router, 4))
        await until(lambda: len(leaving.asked) == 1 and len(staying.asked) == 1)
        agent.leave()
        await until(lambda: any(node.capacity == 0 for node in router.nodes()))
        leaving.go.set()
        staying.go.set()
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {1} and len(leaving.asked) == 1


async def test_a_node_with_another_token_is_refused_and_told() -> None:
    async with router_with(PretendSandbox()) as (router, _, _):
        stranger = NodeAgent(SandboxWork(PretendSandbox()), routers=[router.address], token="wrong", label="stranger")
        with pytest.RaisesGroup(pytest.RaisesExc(Refused, match="token")):
            await stranger.serve()
        assert len(router.nodes()) == 1


async def test_a_router_that_does_not_know_the_token_gets_no_node() -> None:
    """A listener that waves everybody through without proof."""

    async def wave_through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b'{"kind":"challenge","nonce":"0"}'
        writer.write(HEADER.pack(len(body)) + body)
        await reader.read(1)
        body = b'{"kind":"welcome","ack":-1,"proof":"00"}'
        writer.write(HEADER.pack(len(body)) + body)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(wave_through, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.RaisesGroup(pytest.RaisesExc(Refused, match="different tokens")):
        await NodeAgent(SandboxWork(PretendSandbox()), routers=[address], token=TOKEN).serve()
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(2**31) + b"x",
        HEADER.pack(5) + b"hello",
        HEADER.pack(2) + b"[]",
        HEADER.pack(2) + b"{}",
        HEADER.pack(9) + b'{"a":1e9}',
    ],
)
async def test_strangers_are_dropped_without_harm(data: bytes) -> None:
    async with router_with(PretendSandbox()) as (router, _, _):
        host, _, port = router.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
        assert not router.gate.strangers
        assert (await router.run(request("c"))).stdout == "c"


def test_a_router_outlives_event_loops() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN)

    async def once(text: str) -> str:
        agent = NodeAgent(SandboxWork(PretendSandbox()), routers=[router.address], token=TOKEN)
        serving = asyncio.create_task(agent.serve())
        response = await router.run(request(text))
        serving.cancel()
        agent.uplinks[0].hang_up()
        return response.stdout

    assert asyncio.run(once("first")) == "first"
    assert asyncio.run(once("second")) == "second"
    router.close()
    with pytest.raises(SandboxDown):
        asyncio.run(once("third"))


async def test_a_link_puts_frames_together_from_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link, got = Link(ours), []
    link.on_message = got.append
    link.attach(asyncio.get_running_loop())
    body = '{"text":"ü"}'.encode()
    stream = (HEADER.pack(len(body)) + body) * 3
    for at in range(len(stream)):
        theirs.send(stream[at : at + 1])
        await asyncio.sleep(0)
    theirs.send(stream)
    await until(lambda: len(got) == 6)
    assert got == [{"text": "ü"}] * 6
    link.close()
    theirs.close()
