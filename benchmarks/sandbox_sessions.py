"""What a cell of a session costs in CPU, against running its whole history again. Prints a table and one JSON line.

Every cell is the same small one. A replay is one fresh program that runs all cells so far, as services without sessions
do. CPU is that of this process and of all below it; medians over rounds in which the kinds take turns.

    python benchmarks/sandbox_sessions.py [--cells 300] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable

from cpu import cpu_seconds

from rocstar.sandbox.call import Call, Limits, ProgramOutcome
from rocstar.sandbox.client import SandboxClient

CELLS = {
    "arithmetic": "n = globals().get('n', 0) + 1\nprint(sum(i * i for i in range(1000)))",
    "numpy": "import numpy as np\na = np.arange(10000.0).reshape(100, 100) + np.eye(100)\nprint(np.linalg.det(a) > 0)",
    "sympy": "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(x * sp.exp(x), x))",
}
LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0)
HISTORIES = (1, 5, 20)
PROGRAMS = 10  # of a round: processes count in steps of 10 ms
SETTLE_SECONDS = 0.5  # for the daemon to account for what has ended


async def cpu_ms(work: Callable[[], Awaitable[None]]) -> float:
    before = cpu_seconds(os.getpid())
    await work()
    return 1000 * (cpu_seconds(os.getpid()) - before)


async def cell_ms(client: SandboxClient, cell: str, count: int) -> float:
    """Of one cell, the first two of a session left out."""
    async with client.open_session(limits=LIMITS, seed=1) as session:

        async def run(count: int) -> None:
            for _ in range(count):
                response = await session.run(cell)
                assert response.outcome is ProgramOutcome.OK and response.replayed_cells == 0, response

        await run(2)
        return await cpu_ms(lambda: run(count)) / count


async def replay_ms(client: SandboxClient, cell: str, history: int) -> float:
    """Of one program that holds so many cells."""
    call = Call(id="replay", code="\n".join([cell] * history), limits=LIMITS, seed=1)

    async def run() -> None:
        for _ in range(PROGRAMS):
            assert (await client.run(call)).outcome is ProgramOutcome.OK

    return await cpu_ms(run) / PROGRAMS


async def first_ms(client: SandboxClient, cell: str) -> float:
    """Of the first cell of a session, its slot's start and end included: as the daemon accounts for it, since what a
    slot used that has ended cannot be seen from outside."""
    before = client.cpu_seconds() + time.process_time()
    for _ in range(PROGRAMS):
        async with client.open_session(limits=LIMITS, seed=1) as session:
            assert (await session.run(cell)).outcome is ProgramOutcome.OK
    await asyncio.sleep(SETTLE_SECONDS)
    await client.run(Call(id="settle", code=""))
    await asyncio.sleep(SETTLE_SECONDS)
    return 1000 * (client.cpu_seconds() + time.process_time() - before) / PROGRAMS


async def measure(client: SandboxClient, name: str, options: argparse.Namespace) -> dict[str, float | str]:
    cell = CELLS[name]
    await cell_ms(client, cell, 2)
    await replay_ms(client, cell, 1)
    rounds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        rounds.setdefault("cell", []).append(await cell_ms(client, cell, options.cells))
        rounds.setdefault("first", []).append(await first_ms(client, cell))
        for history in HISTORIES:
            rounds.setdefault(f"replay_{history}", []).append(await replay_ms(client, cell, history))
    return {"kind": name} | {key: round(statistics.median(seen), 2) for key, seen in rounds.items()}


async def measure_all(client: SandboxClient, options: argparse.Namespace) -> list[dict[str, float | str]]:
    return [await measure(client, name, options) for name in CELLS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=300, help="cells of a session in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with SandboxClient.start(slots=2) as client:
        rows = asyncio.run(measure_all(client, options))
        level = client.info().isolation
    columns = ("cell", "first", *(f"replay_{history}" for history in HISTORIES))
    print(f"CPU ms, {level}".ljust(14) + "".join(f"{column:>12}" for column in columns))
    for row in rows:
        print(f"{row['kind']:<14}" + "".join(f"{row[column]:>12}" for column in columns))
    print(json.dumps({"benchmark": "sandbox_sessions", "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
