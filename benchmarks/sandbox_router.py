"""The router alone: calls a second, latency it adds with 45,000 calls in flight, and the cores a load needs.

Nodes are simulated, in processes of their own on this machine: 44 nodes of 1,024 slots in all, real connections and
real frames, but nothing is run. This process holds the router and the callers, and its CPU counts both. The CPU
figure is the one to trust on a shared machine; wall figures say what this machine gave today.

Added latency is the time from `run` to its return, less the time the node measured for the call itself.

    python benchmarks/sandbox_router.py [--calls 100000] [--in-flight 45000] [--rounds 3] [--cpu-ms 2.0 3.3 20]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rocstar.sandbox.router.codec import encoded_request
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request

LIMITS = Limits()
PROGRAM = "import math\nfor n in range({n}, {n} + 10):\n    print(n, math.factorial(n % 20), sum(range(n)))\n"
KINDS = ("throughput", "in flight", "at once")
WORKLOADS = ("W1", "W2", "W3")


@dataclass
class Round:
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process: router and callers."""
    calls: int = 0
    added: list[float] = field(default_factory=list)
    """Latency beyond the node's own time, seconds, one per call counted."""

    def figures(self) -> dict[str, float]:
        ranked = sorted(self.added)
        return {
            "calls_per_second": self.calls / self.wall_seconds,
            "cpu_us_per_call": 1e6 * self.cpu_seconds / self.calls,
            "calls_per_cpu_second": self.calls / self.cpu_seconds,
            "added_p50_ms": 1000 * ranked[len(ranked) // 2],
            "added_p99_ms": 1000 * ranked[int(0.99 * len(ranked))],
            "added_max_ms": 1000 * ranked[-1],
        }


@contextmanager
def simulated(router: Router, token: str, *, nodes: int, slots: int, processes: int, service: str) -> Iterator[None]:
    command = [sys.executable, "-m", "rocstar.sandbox.router.simulate", "--router", router.address, "--token-file=-"]
    share = [f"--nodes={nodes // processes}", f"--slots={slots}", f"--time={service}", f"--parent={os.getpid()}"]
    started = []
    for number in range(processes):
        process = subprocess.Popen([*command, *share, f"--seed={1000 * number}"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(f"{token}\n".encode())
        process.stdin.close()
        started.append(process)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


async def closed_loop(router: Router, callers: int, calls: int) -> Round:
    """`callers` at once, each with its next call as soon as the last is answered. Every answer is checked. The first
    call of each caller comes in one burst and is not counted in the latency."""
    seen = Round(calls=calls)
    numbers = iter(range(calls))

    async def caller() -> None:
        first = True
        for number in numbers:
            code = PROGRAM.replace("{n}", str(number))
            sent = time.monotonic()
            response = await router.run(Request(id=str(number), code=code, limits=LIMITS))
            assert response.outcome is ProgramOutcome.OK and response.stdout == code and response.id == str(number)
            if not first:
                seen.added.append(time.monotonic() - sent - response.run_seconds)
            first = False

    await timed(seen, [caller() for _ in range(callers)])
    return seen


async def burst(router: Router, calls: int) -> Round:
    """All calls at once."""
    seen = Round(calls=calls)
    start = time.monotonic()

    async def caller(number: int) -> None:
        code = PROGRAM.replace("{n}", str(number))
        response = await router.run(Request(id=str(number), code=code, limits=LIMITS))
        assert response.outcome is ProgramOutcome.OK and response.stdout == code and response.id == str(number)
        seen.added.append(time.monotonic() - start - response.run_seconds)

    await timed(seen, [caller(number) for number in range(calls)])
    return seen


async def timed(seen: Round, coroutines: list) -> None:  # type: ignore[type-arg]
    gc.collect()
    wall, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*coroutines)
    seen.wall_seconds, seen.cpu_seconds = time.monotonic() - wall, time.process_time() - cpu


async def measure(options: argparse.Namespace, token: str, kind: str) -> list[Round]:
    service = {
        "throughput": f"exponential:{options.brief}",
        "in flight": f"uniform:{options.service}",
        "at once": "constant:0.3",  # the mean that the paper gives
    }[kind]
    router = Router(address="127.0.0.1:0", token=token, seed=0)
    with simulated(
        router, token, nodes=options.nodes, slots=options.slots, processes=options.processes, service=service
    ):
        await router.wait_for_nodes(options.nodes, seconds=60.0)
        rounds = []
        for number in range(options.rounds + 1):  # the first touches memory that the others find touched
            if kind == "throughput":
                seen = await closed_loop(router, options.callers, options.calls if number else options.calls // 10)
            elif kind == "in flight":
                seen = await closed_loop(router, options.in_flight, options.in_flight * 2)
            else:
                seen = await burst(router, options.in_flight)
            rounds.append(seen)
        router.close()
    return rounds[1:]


def yardstick_us() -> float:
    """CPU of encoding and decoding one request here and now: how fast this core is while others use it too."""
    request = Request(id="1", code=PROGRAM, limits=LIMITS)
    start = time.process_time()
    for _ in range(10_000):
        json.loads(encoded_request(request, "1"))
    return (time.process_time() - start) * 100


def cores(rate: float, cpu_ms: float, calls_per_cpu_second: float) -> dict[str, float]:
    return {"nodes": rate * cpu_ms / 1000, "routers": rate / calls_per_cpu_second}


def main() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # as a service should: 45,000 calls are alive here, and none is garbage
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000, help="of a throughput round")
    parser.add_argument("--callers", type=int, default=2000, help="at once in a throughput round")
    parser.add_argument("--in-flight", type=int, default=45_000)
    parser.add_argument("--brief", type=float, default=0.01, help="mean time of a call in a throughput round, seconds")
    parser.add_argument("--service", type=float, default=20.0, help="mean time of a call with many in flight, seconds")
    parser.add_argument("--nodes", type=int, default=44)
    parser.add_argument("--slots", type=int, default=1024, help="of a node")
    parser.add_argument("--processes", type=int, default=2, help="that the simulated nodes share")
    parser.add_argument("--only", action="append", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-ms", type=float, nargs=3, default=(2.0, 3.3, 20.0), help="measured, of W1 W2 W3")
    options = parser.parse_args()
    token = secrets.token_hex(16)
    rows = {}
    print(f"{'':<12}{'calls/s':>9}{'CPU us/call':>13}{'calls/CPU s':>13}{'added p50':>11}{'p99':>9}{'max':>9}  ms")
    for kind in options.only or KINDS:
        rounds = [each.figures() for each in asyncio.run(measure(options, token, kind))]
        row = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        rows[kind] = {name: round(value, 1) for name, value in row.items()}
        print(
            f"{kind:<12}{row['calls_per_second']:>9,.0f}{row['cpu_us_per_call']:>13.1f}"
            f"{row['calls_per_cpu_second']:>13,.0f}{row['added_p50_ms']:>11.1f}{row['added_p99_ms']:>9.1f}"
            f"{row['added_max_ms']:>9.1f}",
            flush=True,
        )
    speed = rows.get("throughput", row)["calls_per_cpu_second"]
    needed = {}
    print(f"\ncores for              {'20,000 calls/s':>24}{'45,000 within 1 s':>24}{'45,000 within 10 s':>24}")
    for name, cpu_ms in zip(WORKLOADS, options.cpu_ms, strict=True):
        needed[name] = {str(rate): cores(rate, cpu_ms, speed) for rate in (20_000, 45_000, 4500)}
        cells = "".join(f"{each['nodes']:>13,.0f} + {each['routers']:.1f} router" for each in needed[name].values())
        print(f"{name} at {cpu_ms:>4} ms a call {cells}")
    result = {"benchmark": "sandbox_router", "python": platform.python_version(), "cores": os.cpu_count()}
    yardstick = round(yardstick_us(), 1)
    print(f"\none request encoded and decoded: {yardstick} us of CPU, here and now")
    print(
        json.dumps(
            {**result, "yardstick_us": yardstick, "rounds": options.rounds, "rows": rows, "cores_needed": needed}
        )
    )


if __name__ == "__main__":
    main()
