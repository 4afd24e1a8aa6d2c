"""What a call costs in CPU: the sandbox against a fresh interpreter, its own path without walls, bare forks, and
code-judge where a checkout of it is given. Prints tables and, last, one JSON line.

CPU is that of the whole tree that serves the calls: for the sandbox its client, host, slots and programs, not what
started them. Rounds are interleaved (each contestant in turn, then all again), figures are medians over rounds; on a
busy machine ratios hold better than milliseconds.

    python benchmarks/sandbox_peers.py [--rounds 3] [--code-judge PATH] [--skip-loops]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
from code_judge import CodeJudge

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.jail import PLANS
from rocstar.sandbox.wire import Isolation, Limits, ProgramOutcome, Request

WORKLOADS = {
    "W1": "print(1+1)",
    "W2": "import numpy as np; print(np.linalg.det(np.eye(4)))",
    "W3": "import sympy as sp; x=sp.symbols('x'); print(sp.integrate(sp.sin(x)**2,(x,0,1)))",
}
EXPECTED = {"W1": "2\n", "W2": "1.0\n", "W3": "-sin(1)*cos(1)/2 + 1/2\n"}
CALLS = {"W1": 200, "W2": 100, "W3": 20}
FRESH_CALLS = {"W1": 20, "W2": 8, "W3": 4}
LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0)  # a busy machine must not end a call
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
TARGETS = {"W1": 6.0, "W2": 25.0, "W3": 14.0}
LOOP_SHARE, LOOP_SECONDS, CALLERS = 0.05, 2.0, 16

Contestant = Callable[[str], float]
"""Workload name in; CPU milliseconds per call out. Raises when an answer is wrong."""


def fresh(workload: str) -> float:
    """One `python -c` after the other."""
    environment = {**os.environ, **ONE_THREAD}
    before = children_seconds()
    for _ in range(FRESH_CALLS[workload]):
        command = [sys.executable, "-c", WORKLOADS[workload]]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        check(workload, done.stdout)
    return 1000 * (children_seconds() - before) / FRESH_CALLS[workload]


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check(workload: str, output: str) -> None:
    if output != EXPECTED[workload]:
        raise AssertionError(f"{workload} printed {output!r}")


class Sandbox:
    """A contestant made of a running sandbox."""

    def __init__(self, client: SandboxClient) -> None:
        self.client = client

    def __call__(self, workload: str) -> float:
        calls = CALLS[workload]
        before = self.client.cpu_seconds() + time.process_time()
        asyncio.run(self.run(workload, calls))
        return 1000 * (self.client.cpu_seconds() + time.process_time() - before) / calls

    async def run(self, workload: str, calls: int) -> None:
        requests = [Request(id=str(n), code=WORKLOADS[workload], limits=LIMITS, seed=n) for n in range(calls)]
        for response in await asyncio.gather(*map(self.client.run, requests)):
            check(workload, response.stdout)


@contextmanager
def sandbox(**settings: Any) -> Iterator[Sandbox]:
    client = SandboxClient(slots=2, preload=(), **settings)
    client.launch()
    client.await_hello()
    with client:
        yield Sandbox(client)


FORKS = 300
FORK_FLOOR = """
import os, resource, sys
def seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
before = seconds()
for _ in range({forks}):
    if not (pid := os.fork()):
        {work}
        os._exit(0)
    os.waitpid(pid, 0)
print(1000 * (seconds() - before) / {forks})
"""


def fork_floor(work: str) -> float:
    """CPU ms of a fork of a bare interpreter that does `work` and leaves, measured inside that interpreter."""
    code = FORK_FLOOR.format(forks=FORKS, work=work)
    command = [sys.executable, "-I", "-S", "-c", code]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def idle_memory(client: SandboxClient) -> dict[str, float]:
    """MB that one idle slot, with its guardian, holds for itself alone; over the slots of all tiers that are up."""
    found: dict[str, list[float]] = {}
    host = psutil.Process(client.process.pid)
    for nursery in host.children():
        memory = nursery.memory_full_info()
        for guardian in nursery.children():
            family = [guardian, *guardian.children(recursive=True)]
            own = sum(process.memory_full_info().uss for process in family) / 1e6
            found.setdefault(f"nursery of {memory.rss / 1e6:.0f} MB", []).append(own)
    return {name: round(statistics.mean(sizes), 2) for name, sizes in found.items()}


async def closed_loop(client: SandboxClient, loop_share: float, seconds: float) -> dict[str, float]:
    """CALLERS callers, each sending its next call when the last is answered; latencies of the good ones, ms."""
    latencies: list[float] = []
    wrong = 0
    until = time.monotonic() + seconds
    limits = Limits(wall_seconds=LOOP_SECONDS, cpu_seconds=60.0)

    async def caller(number: int) -> None:
        nonlocal wrong
        draw = random.Random(number)
        while time.monotonic() < until:
            endless = draw.random() < loop_share
            code = "while True: pass" if endless else WORKLOADS["W1"]
            started = time.monotonic()
            response = await client.run(Request(id="loop", code=code, limits=limits))
            wanted = ProgramOutcome.WALL_TIMEOUT if endless else ProgramOutcome.OK
            wrong += response.outcome is not wanted
            if not endless:
                latencies.append(1000 * (time.monotonic() - started))

    await asyncio.gather(*map(caller, range(CALLERS)))
    ranks = statistics.quantiles(latencies, n=100)
    return {"p50": round(ranks[49], 1), "p95": round(ranks[94], 1), "good": len(latencies), "wrong": wrong}


def loops(rounds: int, seconds: float) -> dict[str, Any]:
    """W5, with and without its endless loops, interleaved."""
    seen: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with SandboxClient.start(slots=64, preload=()) as client:
        asyncio.run(closed_loop(client, 0.0, 1.0))
        for _ in range(rounds):
            seen["without"].append(asyncio.run(closed_loop(client, 0.0, seconds)))
            seen["with"].append(asyncio.run(closed_loop(client, LOOP_SHARE, seconds)))
    middle = {name: statistics.median(each["p50"] for each in runs) for name, runs in seen.items()}
    wrong = sum(each["wrong"] for runs in seen.values() for each in runs)
    return {"p50_ms": middle, "ratio": round(middle["with"] / middle["without"], 2), "wrong": wrong}


def compete(contestants: dict[str, Contestant], rounds: int) -> dict[str, dict[str, list[float]]]:
    seen: dict[str, dict[str, list[float]]] = {name: {work: [] for work in WORKLOADS} for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always follows the same one
            for work in WORKLOADS:
                cost = contestants[name](work)
                if number:  # the first round brings everything up
                    seen[name][work].append(cost)
    return seen


def print_table(medians: dict[str, dict[str, float]]) -> None:
    print(f"{'CPU ms per call':<28}" + "".join(f"{work:>10}" for work in WORKLOADS))
    for name, row in medians.items():
        print(f"{name:<28}" + "".join(f"{row[work]:>10.2f}" for work in WORKLOADS))
    ours = medians["sandbox"]
    for name in medians.keys() - {"sandbox"}:
        print(f"{name + ' / sandbox':<28}" + "".join(f"{medians[name][w] / ours[w]:>9.2f}x" for w in WORKLOADS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--code-judge", help="a checkout of code-judge; needs redis-server")
    parser.add_argument("--code-judge-python", default=sys.executable, help="an interpreter that has its requirements")
    parser.add_argument("--skip-loops", action="store_true", help="leave out W5, which takes half a minute")
    parser.add_argument("--loop-seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        ours = stack.enter_context(sandbox())
        bare = {"min_isolation": Isolation.L0, "skip_plans": len(PLANS) - 1}
        contestants: dict[str, Contestant] = {
            "sandbox": ours,
            "without walls": stack.enter_context(sandbox(**bare)),
            "python fork path": stack.enter_context(sandbox(compiled=False)),
            "fresh python": fresh,
        }
        if arguments.code_judge:
            judge = CodeJudge(arguments.code_judge, WORKLOADS, EXPECTED, arguments.code_judge_python)
            contestants["code-judge"] = stack.enter_context(judge)
        else:
            print("code-judge: left out, no --code-judge PATH given")
        seen = compete(contestants, arguments.rounds)
        info = ours.client.info()
        memory = idle_memory(ours.client)
        floors = {"fork": "pass", "fork and W1": f"exec({WORKLOADS['W1']!r}, {{}})"}
        floor = {name: statistics.median(fork_floor(work) for _ in range(3)) for name, work in floors.items()}
    medians = {name: {work: statistics.median(costs) for work, costs in row.items()} for name, row in seen.items()}
    print_table(medians)
    report(medians, floor, memory, info.fork_path)
    extra = {} if arguments.skip_loops else {"w5": loops(arguments.rounds, arguments.loop_seconds)}
    if extra:
        print("W5, p50 of good calls with and without endless loops:", extra["w5"])
    summary = {
        "benchmark": "sandbox_peers",
        "python": platform.python_version(),
        "isolation": info.isolation,
        "fork_path": info.fork_path,
        "cpu_ms": {name: {work: round(cost, 3) for work, cost in row.items()} for name, row in medians.items()},
        "floor_ms": {name: round(cost, 3) for name, cost in floor.items()},
        "idle_slot_mb": memory,
        **extra,
    }
    print(json.dumps(summary))


def report(
    medians: dict[str, dict[str, float]], floor: dict[str, float], memory: dict[str, float], fork_path: str
) -> None:
    print(f"fork path: {fork_path}; bare fork floor, ms: " + ", ".join(f"{n} {c:.2f}" for n, c in floor.items()))
    for work, target in TARGETS.items():
        ratio = medians["fresh python"][work] / medians["sandbox"][work]
        walls = 100 * (medians["sandbox"][work] / medians["without walls"][work] - 1)
        verdict = "reached" if ratio >= target else "MISSED"
        print(
            f"{work}: {ratio:.1f}x fresh python, target {target:.0f}x {verdict}; walls cost {walls:+.0f}%, target 15%"
        )
    print(f"memory of an idle slot alone, MB: {memory}")


if __name__ == "__main__":
    main()
