"""What a call of the trusted lane costs: one after the other, and as batches. Prints a table and, last, one JSON line.

The target is `json:dumps`, so the figures are the lane's own. CPU is that of this process and of the workers.

    python benchmarks/trusted_lane.py [--calls 20000] [--workers 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rocstar.sandbox.trusted import TrustedPool

DEADLINE_SECONDS = 30.0
TICKS_PER_SECOND = 100


def cpu_seconds(pool: TrustedPool) -> float:
    """Of this process and the workers so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pool.worker_pids()]
    return time.process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS_PER_SECOND


async def one_by_one(pool: TrustedPool, calls: int) -> None:
    for number in range(calls):
        assert await pool.call(["a", str(number)], deadline_seconds=DEADLINE_SECONDS) == f'["a", "{number}"]'


async def in_batches(pool: TrustedPool, calls: int) -> None:
    values = await pool.call_batch([["a", str(number)] for number in range(calls)], deadline_seconds=DEADLINE_SECONDS)
    assert values == [f'["a", "{number}"]' for number in range(calls)]


async def measure(pool: TrustedPool, way: Callable[[TrustedPool, int], Awaitable[None]], calls: int) -> list[float]:
    """(CPU us a call, wall us a call)"""
    cpu, wall = cpu_seconds(pool), time.monotonic()
    await way(pool, calls)
    return [1e6 * (cpu_seconds(pool) - cpu) / calls, 1e6 * (time.monotonic() - wall) / calls]


async def rows(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = {}
    with TrustedPool(target="json:dumps", workers=options.workers) as pool:
        await in_batches(pool, 1000)
        for name, way, calls in (
            ("one by one", one_by_one, options.calls // 10),
            ("in batches", in_batches, options.calls),
        ):
            seen = [await measure(pool, way, calls) for _ in range(options.rounds)]
            cpu, wall = (round(statistics.median(column), 1) for column in zip(*seen, strict=True))
            found[name] = {"cpu_us_per_call": cpu, "wall_us_per_call": wall}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = asyncio.run(rows(options))
    print(f"{'':<12}{'CPU us/call':>12}{'wall us/call':>14}")
    for name, row in found.items():
        print(f"{name:<12}{row['cpu_us_per_call']:>12}{row['wall_us_per_call']:>14}")
    print(json.dumps({"benchmark": "trusted_lane", "python": platform.python_version(), "rows": found}))


if __name__ == "__main__":
    main()
