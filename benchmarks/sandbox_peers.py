"""What a call costs in CPU: this checkout's sandbox against another checkout of it, and against a fresh interpreter.
Prints tables and, last, one JSON line. Other systems are measured by `rocstar sandbox bench`.

CPU is that of the whole tree of processes that serves the calls, their client included, as /proc tells it (10 ms
steps); starting it is not counted. Rounds are interleaved (each contestant in turn, then all again, each time beginning
with another); milliseconds are medians over rounds, ratios medians of each round's, which hold on a busy machine.

    python benchmarks/sandbox_peers.py [--rounds 5] [--against CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import psutil
from frame import ROOT, Table, Worker, by_turns, cpu_seconds, parser, report, spent, tree

WORKLOADS = {
    "W1": "print(1+1)",
    "W2": "import numpy as np; print(np.linalg.det(np.eye(4)))",
    "W3": "import sympy as sp; x=sp.symbols('x'); print(sp.integrate(sp.sin(x)**2,(x,0,1)))",
}
EXPECTED = {"W1": "2\n", "W2": "1.0\n", "W3": "-sin(1)*cos(1)/2 + 1/2\n"}
CALLS = {"W1": 400, "W2": 200, "W3": 30}
FRESH_CALLS = {"W1": 20, "W2": 8, "W3": 4}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Contestant = Callable[[str], float]
"""Workload name in; CPU milliseconds per call out. Raises when an answer is wrong."""
Costs = list[dict[str, dict[str, float]]]
"""Of each round, by contestant and workload."""
Rows = dict[str, dict[str, float]]


class Sandbox(Worker):
    """A contestant: the sandbox of a checkout, in a process that imports that checkout's rocstar (`served`)."""

    def __init__(self, checkout: str) -> None:
        outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, __file__, "--worker", checkout]
        super().__init__(command, cwd="/", env=outside)
        self.info: dict[str, str] = json.loads(self.line())

    def __call__(self, workload: str) -> float:
        """Raises AssertionError where a process ended meanwhile that was not the first to run: its CPU is not known."""
        pid, calls = self.process.pid, CALLS[workload]
        before, alive = cpu_seconds(pid), set(tree(pid))
        self.ask(f"{workload} {calls}")
        ended = alive - set(tree(pid))
        assert not ended, f"CPU of {ended} cannot be told"
        return 1000 * (cpu_seconds(pid) - before) / calls

    def idle_slot_megabytes(self) -> dict[str, float]:
        """What an idle slot with its keeper holds for itself alone, by zygote."""
        daemon = psutil.Process(self.process.pid).children()[0]
        found = {}
        for zygote in daemon.children():
            sizes = [own_megabytes([keeper, *keeper.children(recursive=True)]) for keeper in zygote.children()]
            name = f"zygote of {zygote.memory_full_info().rss / 1e6:.0f} MB"
            found |= {name: round(statistics.mean(sizes), 2)} if sizes else {}
        return found


def client() -> Any:
    """A client not yet started."""
    from rocstar.sandbox.call import DaemonSettings, Isolation
    from rocstar.sandbox.client import SandboxClient

    return SandboxClient(DaemonSettings(slots=2, preload=(), min_isolation=Isolation.L1))


async def run_calls(client: Any, workload: str, calls: int) -> None:
    from rocstar.sandbox.call import Call, Limits

    code = WORKLOADS[workload]
    limits = Limits(wall_seconds=60.0, cpu_seconds=60.0)  # a busy machine must not end a call
    sent = [Call(id=str(n), code=code, limits=limits, seed=n) for n in range(calls)]
    for response in await asyncio.gather(*map(client.run, sent)):
        if response.stdout != EXPECTED[workload]:
            raise AssertionError(f"{workload} ended with {response}")


def served() -> None:
    """Makes the calls of each `WORKLOAD CALLS` line on stdin, then says `done`."""
    with client() as started:
        started.launch()
        started.await_hello()
        print(json.dumps({"isolation": started.info().isolation}), flush=True)
        for line in sys.stdin:
            workload, calls = line.split()
            asyncio.run(run_calls(started, workload, int(calls)))
            print("done", flush=True)


def own_megabytes(processes: Iterable[psutil.Process]) -> float:
    """Memory that only these processes hold."""
    return sum(process.memory_full_info().uss for process in processes) / 1e6


def fresh(workload: str) -> float:
    """One `python -c` after the other."""
    environment = {**os.environ, **ONE_THREAD}
    with spent(lambda: sum(os.times()[2:4])) as seconds:  # of children that have ended
        for _ in range(FRESH_CALLS[workload]):
            command = [sys.executable, "-c", WORKLOADS[workload]]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            if done.stdout != EXPECTED[workload]:
                raise AssertionError(f"{workload} printed {done.stdout!r}")
    return 1000 * seconds.cpu / FRESH_CALLS[workload]


def compete(contestants: dict[str, Contestant], rounds: int) -> Costs:
    """The first round, which brings everything up, is not counted."""

    def all_workloads(contestant: Contestant) -> Callable[[], dict[str, float]]:
        return lambda: {work: contestant(work) for work in WORKLOADS}

    return by_turns({name: all_workloads(each) for name, each in contestants.items()}, range(rounds + 1))[1:]


def medians_of(seen: Costs) -> Rows:
    return {
        name: {work: round(statistics.median(costs[name][work] for costs in seen), 3) for work in WORKLOADS}
        for name in seen[0]
    }


def ratios_of(seen: Costs) -> Rows:
    """Those that are looked for."""
    pairs = {
        "fresh python / here": ("fresh python", "here"),
        "here / against": ("here", "against"),
    }
    return {
        name: {
            work: round(statistics.median(costs[above][work] / costs[below][work] for costs in seen), 3)
            for work in WORKLOADS
        }
        for name, (above, below) in pairs.items()
        if above in seen[0] and below in seen[0]
    }


def print_table(title: str, rows: Rows) -> None:
    table = Table(title, *WORKLOADS, first=36, width=10)
    for name, row in rows.items():
        table.row(name, *row.values())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--against", metavar="CHECKOUT", help="another checkout, its compiled part built")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        sys.path[0] = options.worker  # in place of this folder
        served()
        return
    checkouts = {"here": str(ROOT)} | ({"against": os.path.abspath(options.against)} if options.against else {})
    with ExitStack() as stack:
        sandboxes = {where: stack.enter_context(Sandbox(checkout)) for where, checkout in checkouts.items()}
        contestants: dict[str, Contestant] = {**sandboxes, "fresh python": fresh}
        seen = compete(contestants, options.rounds)
        about = {name: each.info for name, each in sandboxes.items()}
        memory = sandboxes["here"].idle_slot_megabytes()
    medians, ratios = medians_of(seen), ratios_of(seen)
    print_table("CPU ms per call", medians)
    print_table("ratio", ratios)
    print(f"memory of an idle slot alone, MB: {memory}")
    print("\n".join(f"{name}: {info}" for name, info in about.items()))
    report(about=about, cpu_ms=medians, ratios=ratios, idle_slot_mb=memory)


if __name__ == "__main__":
    main()
