"""What a tiny sandboxed call costs in CPU, by what is preloaded. Prints a table and, last, one JSON line.

Each round sends all calls at once. CPU is that of this process during the rounds plus all of the sandbox's: host,
slots and programs. Wall time is printed for orientation only; on a busy machine it means little.

    python benchmarks/sandbox_calls.py [--calls 400] [--rounds 5] [--slots 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from dataclasses import dataclass

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, Request

TINY = "import math\nprint(math.gcd(12,18))"
PRELOADS = {"none": (), "numpy": ("numpy",), "numpy+sympy": ("numpy", "sympy")}


@dataclass
class Round:
    sandbox_ms: float
    """CPU of host, slots and programs per call, milliseconds."""
    client_ms: float
    """CPU of the calling process per call, milliseconds."""
    wall_seconds: float


async def one_round(client: SandboxClient, calls: int) -> Round:
    requests = [Request(id=str(n), code=TINY, limits=Limits(), seed=n) for n in range(calls)]
    sandbox, mine, wall = client.cpu_seconds(), time.process_time(), time.monotonic()
    responses = await asyncio.gather(*(client.run(request) for request in requests))
    assert all(response.stdout == "6\n" for response in responses), "a call gave a wrong answer"
    return Round(
        1000 * (client.cpu_seconds() - sandbox) / calls,
        1000 * (time.process_time() - mine) / calls,
        time.monotonic() - wall,
    )


async def rounds(client: SandboxClient, calls: int, count: int) -> list[Round]:
    await one_round(client, calls // 4)  # first calls touch memory that later ones find touched
    return [await one_round(client, calls) for _ in range(count)]


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    with SandboxClient.start(slots=arguments.slots, preload=PRELOADS[name]) as client:
        seen = asyncio.run(rounds(client, arguments.calls, arguments.rounds))
        level = client.info().isolation
    totals = [each.sandbox_ms + each.client_ms for each in seen]
    return {
        "preload": name,
        "isolation": level,
        "cpu_ms_per_call": round(statistics.median(totals), 3),
        "cpu_ms_per_call_min": round(min(totals), 3),
        "cpu_ms_client": round(statistics.median(each.client_ms for each in seen), 3),
        "calls_per_second": round(arguments.calls / statistics.median(each.wall_seconds for each in seen), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="calls sent at once in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    rows = [measure(name, arguments) for name in PRELOADS]
    print(f"{'preload':<14}{'level':<7}{'CPU ms/call':>12}{'min':>8}{'of it client':>14}{'calls/s':>10}")
    for row in rows:
        cells = (row["cpu_ms_per_call"], row["cpu_ms_per_call_min"], row["cpu_ms_client"], row["calls_per_second"])
        print(f"{row['preload']:<14}{row['isolation']:<7}{cells[0]:>12}{cells[1]:>8}{cells[2]:>14}{cells[3]:>10}")
    print(json.dumps({"benchmark": "sandbox_calls", "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
