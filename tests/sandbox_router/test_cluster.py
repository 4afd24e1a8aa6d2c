"""A local cluster: real node processes, real sandboxes, real programs, killed, frozen and cut off while they work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rocstar.sandbox.router.local import LocalCluster
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.wire import ProgramOutcome, Response, SandboxDown
from tests.sandbox_router.support import TOKEN, Proxy, answer, descendants, is_alive, request, sleeper, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    policy = Policy(silent_seconds=1.5, reconnect_seconds=0.5)
    with LocalCluster.start(nodes=2, slots=2, preload=(), policy=policy) as cluster:
        yield cluster


def pids(cluster: LocalCluster) -> list[int]:
    return [child.process.pid for child in cluster.children]


async def submit(cluster: LocalCluster | Router, count: int, seconds: float = 0.1) -> asyncio.Task[list[Response]]:
    """Programs that sleep; returns once some of them run."""
    calls = asyncio.ensure_future(asyncio.gather(*(cluster.run(sleeper(number, seconds)) for number in range(count))))
    await asyncio.sleep(0.3)
    assert not calls.done()
    return asyncio.create_task(await_all(calls))


async def await_all(calls: asyncio.Future[list[Response]]) -> list[Response]:
    return list(await calls)


def assert_all_right(responses: list[Response]) -> None:
    ends = {(response.outcome, response.message) for response in responses}
    assert ends == {(ProgramOutcome.OK, "")}
    assert [response.stdout for response in responses] == [answer(number) for number in range(len(responses))]


async def test_programs_run_and_the_cluster_looks_like_one_sandbox(cluster: LocalCluster) -> None:
    responses = await asyncio.gather(*(cluster.run(request(f"print({n} * 7)", number=n)) for n in range(60)))
    assert_all_right(list(responses))
    assert cluster.info().slots == 4
    assert {response.isolation for response in responses} == {cluster.info().isolation}
    failed = await cluster.run(request("1 / 0"))
    assert failed.outcome is ProgramOutcome.EXCEPTION and failed.attempt == 1
    await until(lambda: cluster.cpu_seconds() > 0.0)


async def test_a_node_that_is_killed_loses_nothing_and_is_replaced(cluster: LocalCluster) -> None:
    calls = await submit(cluster, 40)
    (killed, other) = pids(cluster)
    os.kill(killed, signal.SIGKILL)
    responses = await calls
    assert_all_right(responses)
    assert {response.attempt for response in responses} == {1, 2}
    await until(lambda: sum(node.connected for node in cluster.nodes()) == 2)
    assert killed not in pids(cluster) and other in pids(cluster)
    assert_all_right(await (await submit(cluster, 20)))


async def test_all_nodes_killed_at_once_and_again_lose_nothing() -> None:
    with LocalCluster.start(nodes=2, slots=2, preload=(), policy=Policy(max_attempts=5)) as cluster:
        calls = await submit(cluster, 60)
        for _ in range(2):
            for pid in pids(cluster):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: sum(node.connected for node in cluster.nodes()) == 0)
            await until(lambda: sum(node.connected for node in cluster.nodes()) == 2)
        assert_all_right(await calls)


async def test_a_frozen_node_is_left_alone_and_welcomed_back(cluster: LocalCluster) -> None:
    calls = await submit(cluster, 40)
    frozen = pids(cluster)[0]
    os.kill(frozen, signal.SIGSTOP)
    responses = await calls
    assert_all_right(responses)
    assert {response.attempt for response in responses} == {1, 2}
    os.kill(frozen, signal.SIGCONT)
    await until(lambda: sum(node.connected for node in cluster.nodes()) == 2)
    assert frozen in pids(cluster)
    await until(lambda: not any(node.held for node in cluster.nodes()))
    assert_all_right(await (await submit(cluster, 20)))


@pytest.mark.parametrize("victim", ["host", "slot"])
async def test_the_death_of_what_is_below_a_node_loses_nothing(cluster: LocalCluster, victim: str) -> None:
    calls = await submit(cluster, 12, seconds=1.0)
    below = descendants(pids(cluster)[0])
    if victim == "host":
        below[0].kill()
    else:
        deepest = max(below, key=lambda process: len(process.parents()))  # a program; a slot runs it
        slot = deepest.parent()
        assert slot is not None
        slot.kill()
    assert_all_right(await calls)


@contextmanager
def node_process(address: str, *options: str, token: str = TOKEN) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "rocstar.sandbox.router.node_main", f"--router={address}", "--token-file=-"]
    more = ["--slots=2", "--preload=", *options]
    node = subprocess.Popen(
        [*command, *more], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert node.stdin is not None and node.stderr is not None
    node.stdin.write(token.encode() + b"\n")
    node.stdin.close()
    try:
        yield node
    finally:
        node.kill()
        node.wait()
        node.stderr.close()


async def test_a_short_cut_of_the_connection_runs_nothing_twice() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=Policy(reconnect_seconds=20.0))
    proxy = Proxy(router.address)
    with node_process(await proxy.start()):
        await router.wait_for_nodes(1, seconds=60.0)
        calls = await submit(router, 16)
        proxy.cut()
        await asyncio.sleep(0.7)
        proxy.mend()
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {1}
    router.close()
    await proxy.close()


async def test_a_long_cut_moves_the_calls_and_the_return_delivers_none_twice() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=Policy(reconnect_seconds=0.3))
    proxy = Proxy(router.address)
    with node_process(await proxy.start()), node_process(router.address):
        await router.wait_for_nodes(2, seconds=60.0)
        calls = await submit(router, 40)
        proxy.cut()
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {1, 2}
        proxy.mend()
        await until(lambda: sum(node.connected for node in router.nodes()) == 2)
        await until(lambda: not any(node.held for node in router.nodes()))
        assert_all_right(await (await submit(router, 20)))
    router.close()
    await proxy.close()


async def test_sigterm_lets_a_node_finish() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN, queue_seconds=2.0)
    with node_process(router.address) as node:
        await router.wait_for_nodes(1, seconds=60.0)
        calls = await submit(router, 6, seconds=0.5)
        node.send_signal(signal.SIGTERM)
        responses = await calls
        assert_all_right(responses)
        assert {response.attempt for response in responses} == {1}
        assert await asyncio.to_thread(node.wait, 30) == 0
    router.close()


async def test_a_node_with_another_token_ends_and_says_why() -> None:
    router = Router(address="127.0.0.1:0", token=TOKEN)
    router.attach(asyncio.get_running_loop())
    with node_process(router.address, token="wrong") as node:
        assert await asyncio.to_thread(node.wait, 60) == 3
        assert node.stderr is not None and b"token" in node.stderr.read()
    router.close()


async def test_cancelling_ends_the_program_on_its_node() -> None:
    with LocalCluster.start(nodes=1, slots=1, preload=(), more=["--capacity=1"]) as cluster:
        call = asyncio.create_task(cluster.run(request("while True: pass")))
        await asyncio.sleep(0.5)
        call.cancel()
        async with asyncio.timeout(10):
            assert (await cluster.run(request("print(0)"))).stdout == answer(0)


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(SandboxDown, match="no_such_module"):
        LocalCluster.start(nodes=1, slots=1, preload=("no_such_module",))


def test_closing_leaves_no_process_and_no_file() -> None:
    cluster = LocalCluster.start(nodes=2, slots=1, preload=())
    everything = [*pids(cluster), *(each.pid for pid in pids(cluster) for each in descendants(pid))]
    asyncio.run(cluster.run(request("print(1)")))
    assert len(everything) > 4
    cluster.close()
    cluster.close()
    assert wait_for_the_end(everything) == []
    assert not Path(cluster.folder).exists()


def test_nodes_end_with_a_parent_that_is_killed_hard() -> None:
    program = (
        "from rocstar.sandbox.router.local import LocalCluster\n"
        "cluster = LocalCluster.start(nodes=1, slots=1, preload=())\n"
        "print(cluster.children[0].process.pid, cluster.folder, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        everything = [int(pid), *(each.pid for each in descendants(int(pid)))]
        parent.kill()
    assert len(everything) > 2
    assert wait_for_the_end(everything) == []
    for path in Path(folder).iterdir():
        path.unlink()
    Path(folder).rmdir()


def wait_for_the_end(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Those that still live then."""
    until = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return alive
