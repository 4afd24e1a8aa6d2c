"""The router with nodes in this process whose sandboxes are simulated: what is on the wire is real."""

from __future__ import annotations

import asyncio
import random
import socket
import sys

import pytest

from rocstar.sandbox.router.agent import NodeAgent
from rocstar.sandbox.router.link import HEADER, Link
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.router.simulate import parse_service_time
from rocstar.sandbox.router.uplink import Refused
from rocstar.sandbox.router.work import SandboxWork
from rocstar.sandbox.wire import (
    HostInfo,
    Isolation,
    Limits,
    ProgramOutcome,
    Request,
    Response,
    SandboxDown,
    ServiceOutcome,
)
from tests.sandbox_router.support import TOKEN, PretendSandbox, request, router_with, until


class Recorder(PretendSandbox):
    """Remembers what it was asked, and answers when told."""

    def __init__(self, *, slots: int = 2) -> None:
        super().__init__(slots=slots)
        self.asked: list[Request] = []
        self.ended: list[str] = []
        self.go = asyncio.Event()
        self.outcomes: list[Response] = []

    async def run(self, request: Request) -> Response:
        self.asked.append(request)
        try:
            await self.go.wait()
        finally:
            self.ended.append(request.code)
        answers = self.outcomes or [Response(id=request.id, outcome=ProgramOutcome.OK, stdout=request.code)]
        return answers.pop(0)


async def run_many(router: Router, count: int) -> list[Response]:
    return list(await asyncio.gather(*(router.run(request(f"c{number}", number=number)) for number in range(count))))


def assert_all_right(responses: list[Response]) -> None:
    assert [response.stdout for response in responses] == [f"c{number}" for number in range(len(responses))]
    assert [response.id for response in responses] == [str(number) for number in range(len(responses))]


async def test_a_request_and_its_response_pass_unchanged() -> None:
    runner = Recorder()
    runner.go.set()
    told = Response(
        id="?", outcome=ProgramOutcome.EXIT_NONZERO, exit_code=3, stdout="ü\ud800\0", stderr="e", value="v",
        truncated_bytes=5, run_seconds=0.5, cpu_seconds=0.25, queue_seconds=1.0, peak_memory_bytes=77,
        isolation="L3", failed_probes=("x",), message="m",
    )  # fmt: skip
    runner.outcomes = [told]
    asked = Request(
        id="mine", code="print('\ud800 ü')", stdin="in\0", seed=5, files={"a/b": "text"},
        limits=Limits(wall_seconds=1.5, cpu_seconds=2.5, memory_bytes=10**8, output_bytes=999, processes=3),
    )  # fmt: skip
    async with router_with(runner) as (router, _, _):
        response = await router.run(asked)
    assert [(each.code, each.stdin, each.seed, each.files, each.limits) for each in runner.asked] == [
        (asked.code, asked.stdin, asked.seed, asked.files, asked.limits)
    ]
    assert response.queue_seconds >= told.queue_seconds
    same = {name: getattr(told, name) for name in Response.__slots__ if name not in ("id", "queue_seconds", "node")}
    assert {name: getattr(response, name) for name in same} == same
    assert response.id == "mine"


async def test_many_calls_are_spread_over_nodes_and_each_gets_its_own_answer() -> None:
    async with router_with(PretendSandbox(), PretendSandbox(), PretendSandbox()) as (router, agents, _):
        assert_all_right(await run_many(router, 3000))
        ran = [agent.uplinks[0].next_number for agent in agents]
    assert sum(ran) == 3000 and min(ran) > 500


async def test_calls_travel_in_batches() -> None:
    runner = Recorder(slots=50)
    async with router_with(runner, policy=Policy(batch_size=10), capacity=100) as (router, (agent,), _):
        frames: list[int] = []
        link = agent.uplinks[0].link
        assert link is not None
        deliver = link.on_message
        link.on_message = lambda message: (frames.append(len(message.get("calls", ()))), deliver(message))[1]
        runner.go.set()
        assert_all_right(await run_many(router, 100))
    assert [size for size in frames if size] == [10] * 10


async def test_no_node_holds_more_than_its_capacity() -> None:
    runner = Recorder()
    async with router_with(runner, capacity=5) as (router, _, _):
        calls = asyncio.create_task(run_many(router, 12))
        await until(lambda: len(runner.asked) == 5)
        await asyncio.sleep(0.1)
        assert len(runner.asked) == 5 and len(router.state.queue) == 7
        runner.go.set()
        assert_all_right(await calls)


async def test_a_third_of_calls_lost_by_nodes_still_all_end_well() -> None:
    policy = Policy(max_attempts=12, rest_seconds=0.01)
    async with router_with(PretendSandbox(fault_rate=0.3), PretendSandbox(fault_rate=0.3, seed=1), policy=policy) as (
        router,
        _,
        _,
    ):
        responses = await run_many(router, 500)
    assert_all_right(responses)
    assert max(response.attempt for response in responses) > 2


async def test_a_call_lost_by_every_node_is_internal_and_says_so() -> None:
    async with router_with(PretendSandbox(fault_rate=1.0), policy=Policy(rest_seconds=0.05)) as (router, _, _):
        response = await router.run(request("x"))
    assert response.outcome is ServiceOutcome.INTERNAL and response.attempt == 3
    assert "lost 3 times" in response.message and "simulated fault" in response.message


@pytest.mark.parametrize("outcome", list(ProgramOutcome))
async def test_what_the_program_did_is_never_tried_again(outcome: ProgramOutcome) -> None:
    runner = Recorder()
    runner.go.set()
    runner.outcomes = [Response(id="?", outcome=outcome)]
    async with router_with(runner) as (router, _, _):
        response = await router.run(request("x"))
    assert response.outcome is outcome and response.attempt == 1 and len(runner.asked) == 1


@pytest.mark.parametrize("outcome", list(ServiceOutcome))
async def test_what_the_service_did_is_tried_again(outcome: ServiceOutcome) -> None:
    runner = Recorder()
    runner.go.set()
    runner.outcomes = [Response(id="?", outcome=outcome), Response(id="?", outcome=ProgramOutcome.OK, attempt=2)]
    async with router_with(runner) as (router, _, _):
        response = await router.run(request("x"))
    assert response.outcome is ProgramOutcome.OK
    assert response.attempt == 3, "one of the router's and two of the node's"


async def test_cancelling_ends_a_running_call_and_drops_a_waiting_one() -> None:
    runner = Recorder()
    async with router_with(runner, capacity=1) as (router, _, _):
        running = asyncio.create_task(router.run(request("running")))
        await until(lambda: len(runner.asked) == 1)
        waiting = asyncio.create_task(router.run(request("waiting")))
        await asyncio.sleep(0.05)
        running.cancel()
        waiting.cancel()
        await until(lambda: runner.ended == ["running"])
        runner.go.set()
        assert (await router.run(request("next"))).stdout == "next"
        assert [each.code for each in runner.asked] == ["running", "next"]


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


async def test_without_nodes_a_call_is_overloaded_after_its_time_in_the_queue() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, queue_seconds=0.2)
    response = await router.run(request("x"))
    assert response.outcome is ServiceOutcome.OVERLOADED and "within 0.2 seconds" in response.message
    assert response.queue_seconds >= 0.2
    with pytest.raises(SandboxDown, match="no node is connected"):
        router.info()
    router.close()


async def test_a_full_queue_tells_the_caller_at_once() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=Policy(max_queue=1))
    waiting = asyncio.create_task(router.run(request("x")))
    await asyncio.sleep(0)
    assert (await router.run(request("y"))).outcome is ServiceOutcome.OVERLOADED
    router.close()
    with pytest.raises(SandboxDown, match="closed"):
        await waiting


async def test_a_call_that_fits_no_frame_is_rejected() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN)
    response = await router.run(request("x" * (65 * 2**20)))
    assert response.outcome is ProgramOutcome.REJECTED and "bytes on the wire" in response.message
    router.close()


async def test_large_calls_and_results_pass() -> None:
    async with router_with(PretendSandbox()) as (router, _, _):
        text = "é" * 2**20
        responses = await asyncio.gather(*(router.run(request(text)) for _ in range(3)))
    assert all(response.stdout == text for response in responses)


async def test_info_is_the_weakest_of_all_nodes() -> None:
    class Weak(PretendSandbox):
        def info(self) -> HostInfo:
            return HostInfo(isolation=Isolation.L3, failed_probes=("b",), slots=3, preload=("numpy",))

    class Strong(PretendSandbox):
        def info(self) -> HostInfo:
            return HostInfo(isolation=Isolation.L2, failed_probes=("a",), slots=5, preload=("numpy", "sympy"))

    runners = [kind() for kind in (Weak, Strong)]
    async with router_with(*runners) as (router, _, _):
        info = router.info()
    assert info == HostInfo(isolation=Isolation.L2, failed_probes=("a", "b"), slots=8, preload=("numpy",))


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


async def test_a_process_of_simulated_nodes_serves_like_real_ones() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=Policy(max_attempts=20, rest_seconds=0.01))
    options = ["--nodes=3", "--slots=20", "--time=uniform:0.005", "--fault-rate=0.1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rocstar.sandbox.router.simulate", "--router", router.address, "--token-file=-"),
        *options,
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(TOKEN.encode() + b"\n")
    process.stdin.close()
    await router.wait_for_nodes(3, seconds=30.0)
    assert router.info().slots == 60
    responses = await run_many(router, 1000)
    assert_all_right(responses)
    assert max(response.attempt for response in responses) > 1
    process.kill()
    await process.wait()
    router.close()


@pytest.mark.parametrize(
    ("text", "low", "high"), [("constant:2", 2, 2), ("uniform:2", 0, 4), ("exponential:2", 0, 1e9)]
)
def test_service_times_have_the_mean_they_name(text: str, low: float, high: float) -> None:
    rng, draw = random.Random(0), parse_service_time(text)
    drawn = [draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(2, rel=0.05)
    assert low <= min(drawn) and max(drawn) <= high


def test_an_unknown_service_time_is_told() -> None:
    with pytest.raises(ValueError, match="is none of"):
        parse_service_time("gamma:1")
