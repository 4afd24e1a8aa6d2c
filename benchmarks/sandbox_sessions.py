"""What a cell of a session costs in CPU, against running its whole history again. Prints a table and one JSON line.

Every cell is the same small one (`cell`). A turn forks the paused process, which then runs one cell; a replay is one
fresh program that runs all cells so far, as services without sessions do. CPU is that of this process plus all of the
sandbox's; medians over rounds in which the two take turns.

    python benchmarks/sandbox_sessions.py [--turns 40] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Awaitable, Callable

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request

CELLS = {
    "arithmetic": "n = globals().get('n', 0) + 1\nprint(sum(i * i for i in range(1000)))",
    "numpy": "import numpy as np\na = np.arange(10000.0).reshape(100, 100) + np.eye(100)\nprint(np.linalg.det(a) > 0)",
    "sympy": "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(x * sp.exp(x), x))",
}
LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0)
HISTORIES = (1, 5, 20)


async def cpu_ms(client: SandboxClient, work: Callable[[], Awaitable[None]]) -> float:
    sandbox, mine = client.cpu_seconds(), time.process_time()
    await work()
    return 1000 * (client.cpu_seconds() - sandbox + time.process_time() - mine)


async def turn_ms(client: SandboxClient, cell: str, turns: int) -> float:
    """Of one turn, the first two of a session left out."""
    async with client.open_session(limits=LIMITS, seed=1) as session:

        async def run(count: int) -> None:
            for _ in range(count):
                response = await session.run(cell)
                assert response.outcome is ProgramOutcome.OK and response.replayed_cells == 0, response

        await run(2)
        return await cpu_ms(client, lambda: run(turns)) / turns


async def replay_ms(client: SandboxClient, cell: str, history: int) -> float:
    """Of one program that holds so many cells."""
    request = Request(id="replay", code="\n".join([cell] * history), limits=LIMITS, seed=1)

    async def run() -> None:
        for _ in range(4):
            assert (await client.run(request)).outcome is ProgramOutcome.OK

    return await cpu_ms(client, run) / 4


async def first_ms(client: SandboxClient, cell: str) -> float:
    """Of the first cell of a session, its slot's start and end included."""
    seen = time.process_time(), client.cpu_seconds()
    for _ in range(4):
        async with client.open_session(limits=LIMITS, seed=1) as session:
            assert (await session.run(cell)).outcome is ProgramOutcome.OK
    await client.run(Request(id="settle", code=""))
    return 1000 * (time.process_time() - seen[0] + client.cpu_seconds() - seen[1]) / 4


async def measure(client: SandboxClient, name: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    cell = CELLS[name]
    await turn_ms(client, cell, 2)
    await replay_ms(client, cell, 1)
    rounds: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        rounds.setdefault("turn", []).append(await turn_ms(client, cell, arguments.turns))
        rounds.setdefault("first", []).append(await first_ms(client, cell))
        for history in HISTORIES:
            rounds.setdefault(f"replay_{history}", []).append(await replay_ms(client, cell, history))
    return {"cell": name} | {key: round(statistics.median(seen), 2) for key, seen in rounds.items()}


async def measure_all(client: SandboxClient, arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    return [await measure(client, name, arguments) for name in CELLS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="turns of a session in a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with SandboxClient.start(slots=2) as client:
        rows = asyncio.run(measure_all(client, arguments))
        level = client.info().isolation
    columns = ("turn", "first", *(f"replay_{history}" for history in HISTORIES))
    print(f"CPU ms, {level}".ljust(14) + "".join(f"{column:>12}" for column in columns))
    for row in rows:
        print(f"{row['cell']:<14}" + "".join(f"{row[column]:>12}" for column in columns))
    print(json.dumps({"benchmark": "sandbox_sessions", "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
