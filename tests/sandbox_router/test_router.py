"""The router with nodes in this process whose sandboxes are simulated: what is on the wire is real."""

from __future__ import annotations

import asyncio

import pytest

from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
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
