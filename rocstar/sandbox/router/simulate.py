"""Simulated nodes, for testing routing at sizes this machine does not have: real nodes on a real wire, whose sandboxes
run nothing and only take their time.

One process has many nodes and ends at SIGINT or with its parent:

    python -m rocstar.sandbox.router.simulate --router ADDRESS --token-file - --nodes 22 --slots 1024 --time constant:1
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from rocstar.sandbox.router import codec
from rocstar.sandbox.router.agent import NodeAgent
from rocstar.sandbox.router.link import ENCODE
from rocstar.sandbox.router.work import Finish, Withdraw
from rocstar.sandbox.wire import HostInfo, Isolation

ServiceTime = Callable[[random.Random], float]
MIN_SLEEP_SECONDS = 0.001  # calls that end closer together end together


class SimulatedWork:
    """Answers each call after a time drawn from `service_time` (seconds), with stdout equal to the program's text; all
    at once, so the node's capacity is the number of its slots. `fault_rate`: fraction of calls that it loses, as a
    sandbox does whose slots die. One timer and no task per call: a core carries many nodes."""

    def __init__(self, *, slots: int, service_time: ServiceTime, fault_rate: float = 0.0, seed: int = 0) -> None:
        self.slots = slots
        self.service_time = service_time
        self.fault_rate = fault_rate
        self.rng = random.Random(seed)
        self.agenda: list[tuple[float, int, float, Mapping[str, Any], Finish]] = []
        """Heap of (when due, number, when begun, call, finish)."""
        self.counter = 0
        self.wake_at = float("inf")
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, call: Mapping[str, Any], finish: Finish) -> Withdraw:
        """Withdrawing changes nothing: it ends in its time."""
        now = time.monotonic()
        self.counter += 1
        due = now + self.service_time(self.rng)
        heappush(self.agenda, (due, self.counter, now, call, finish))
        if due < self.wake_at:
            self.wake(due - now)
        return nothing

    def wake(self, seconds: float) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.wake_at = time.monotonic() + seconds
        self.timer = asyncio.get_running_loop().call_later(seconds, self.ring)

    def ring(self) -> None:
        self.wake_at = float("inf")
        now = time.monotonic()
        while self.agenda and self.agenda[0][0] <= now:
            _, _, begun, call, finish = heappop(self.agenda)
            finish(self.result(call, now - begun))
        if self.agenda:
            self.wake(max(MIN_SLEEP_SECONDS, self.agenda[0][0] - now))

    def result(self, call: Mapping[str, Any], ran: float) -> bytes:
        if self.fault_rate and self.rng.random() < self.fault_rate:
            return codec.encoded_fault("a simulated fault", call["id"])
        return ENCODE(
            {"id": call["id"], "outcome": "ok", "exit_code": 0, "stdout": call["code"], "run_seconds": ran}
        ).encode()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def info(self) -> HostInfo:
        return HostInfo(isolation=Isolation.L1, failed_probes=("simulated",), slots=self.slots, preload=())

    def cpu_seconds(self) -> float:
        return 0.0


def nothing() -> None: ...


def parse_service_time(text: str) -> ServiceTime:
    """`exponential:0.3`, `uniform:0.3` (from 0 to 0.6) or `constant:0.3`, mean in seconds. Raises ValueError."""
    kind, _, mean = text.partition(":")
    seconds = float(mean)
    if kind == "exponential":
        return lambda rng: rng.expovariate(1.0 / seconds)
    if kind == "uniform":
        return lambda rng: 2.0 * seconds * rng.random()
    if kind == "constant":
        return lambda rng: seconds
    raise ValueError(f"{text!r} is none of exponential:SECONDS, uniform:SECONDS, constant:SECONDS")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    token = sys.stdin.readline() if options.token_file == "-" else Path(options.token_file).read_text()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # thousands of calls are alive here, and none is garbage
    try:
        asyncio.run(serve(options, token.strip()))
    except KeyboardInterrupt:
        return


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulated-nodes", description="Nodes that run nothing.")
    parser.add_argument("--router", required=True, metavar="ADDRESS", help="host:port or unix:/path")
    parser.add_argument("--token-file", required=True, metavar="PATH", help="holds the router's token; - reads stdin")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--slots", type=int, default=1024, help="of each node; as many calls are taken at once")
    parser.add_argument("--time", default="exponential:0.3", help="of a call: exponential:S, uniform:S or constant:S")
    parser.add_argument("--fault-rate", type=float, default=0.0, help="of the calls, those that the node loses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parent", type=int, help="process id; end when it does")
    return parser


async def serve(options: argparse.Namespace, token: str) -> None:
    if options.parent:
        asyncio.get_running_loop().add_reader(os.pidfd_open(options.parent), os._exit, 0)
    async with asyncio.TaskGroup() as group:
        for number in range(options.nodes):
            work = SimulatedWork(
                slots=options.slots,
                service_time=parse_service_time(options.time),
                fault_rate=options.fault_rate,
                seed=options.seed + number,
            )
            label = f"simulated-{os.getpid()}-{number}"
            agent = NodeAgent(work, routers=[options.router], token=token, label=label, capacity=options.slots)
            group.create_task(agent.serve())


if __name__ == "__main__":
    main()
