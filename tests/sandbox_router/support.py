"""A proxy that can be cut, and nodes in this process, for the router's tests."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil

from rocstar.sandbox.router.agent import NodeAgent
from rocstar.sandbox.router.nouns import Policy
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.router.work import Runner, SandboxWork
from rocstar.sandbox.wire import HostInfo, Isolation, Limits, ProgramOutcome, Request, Response, SandboxDown

TOKEN = "a token of the tests"


def request(code: str, *, number: int = 0, wall_seconds: float = 30.0) -> Request:
    return Request(id=str(number), code=code, limits=Limits(wall_seconds=wall_seconds, cpu_seconds=30.0))


def sleeper(number: int, seconds: float) -> Request:
    return request(f"import time; time.sleep({seconds}); print({number} * 7)", number=number)


def answer(number: int) -> str:
    return f"{number * 7}\n"


async def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


def descendants(pid: int, name: str = "") -> list[psutil.Process]:
    """Living processes below one, zombies left out; `name`: whose command line contains it."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and name in " ".join(process.cmdline()):
                    found.append(process)
    return found


class PretendSandbox:
    """Has the face of SandboxClient; answers `slots` calls at a time with the program's text, or loses some."""

    def __init__(self, *, slots: int = 8, seconds: float = 0.002, fault_rate: float = 0.0, seed: int = 0) -> None:
        self.slots = slots
        self.seconds = seconds
        self.fault_rate = fault_rate
        self.rng = random.Random(seed)
        self.free = asyncio.Semaphore(slots)

    async def run(self, request: Request) -> Response:
        async with self.free:
            await asyncio.sleep(self.rng.expovariate(1.0) * self.seconds)
        if self.rng.random() < self.fault_rate:
            raise SandboxDown("a simulated fault")
        return Response(id=request.id, outcome=ProgramOutcome.OK, stdout=request.code)

    async def call(self, message: Mapping[str, Any]) -> Response:
        raise NotImplementedError("no sessions are pretended")

    def tell(self, message: Mapping[str, Any]) -> None:
        raise NotImplementedError("no sessions are pretended")

    def info(self) -> HostInfo:
        return HostInfo(isolation=Isolation.L1, failed_probes=(), slots=self.slots, preload=())

    def cpu_seconds(self) -> float:
        return 0.0


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


class Proxy:
    """Stands between nodes and a router; `cut` breaks all connections and refuses new ones until `mend`."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.writers: list[asyncio.StreamWriter] = []
        self.is_cut = False

    async def start(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        other_reader, other_writer = await asyncio.open_connection(self.host, self.port)
        self.writers += [writer, other_writer]
        await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    def cut(self) -> None:
        self.is_cut = True
        for writer in self.writers:
            writer.transport.abort()
        self.writers = []

    def mend(self) -> None:
        self.is_cut = False

    async def close(self) -> None:
        self.cut()
        self.server.close()
        await asyncio.sleep(0.05)  # the two pumps of each connection see its end


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def router_with(
    *runners: Runner, policy: Policy | None = None, capacity: int | None = None, through: bool = False
) -> AsyncIterator[tuple[Router, list[NodeAgent], Proxy]]:
    """A router on TCP and a node in this process for each runner. `through`: behind the proxy."""
    router = Router(address="127.0.0.1:0", token=TOKEN, policy=policy, seed=0)
    proxy = Proxy(router.address)
    address = await proxy.start()
    agents = [
        NodeAgent(
            SandboxWork(runner),
            routers=[address if through else router.address],
            token=TOKEN,
            label=f"n{at}",
            capacity=capacity,
        )
        for at, runner in enumerate(runners)
    ]
    tasks = [asyncio.create_task(agent.serve()) for agent in agents]
    try:
        await router.wait_for_nodes(len(runners), seconds=30.0)
        yield router, agents, proxy
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for agent in agents:
            for uplink in agent.uplinks:
                uplink.hang_up()
        router.close()
        await proxy.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
