"""What a cell of a session costs in CPU, against running its whole history again. Prints a table and one JSON line.

Every cell is the same small one. A replay is one fresh program that runs all cells so far, as services without sessions
do. CPU is that of this process and of all below it; medians over rounds in which the kinds take turns.

    python benchmarks/sandbox_sessions.py [--cells 300] [--rounds 5]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

from frame import by_turns, own_tree, parser, print_rows, report, spent

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
    with spent(own_tree) as seconds:
        await work()
    return 1000 * seconds.cpu


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


def measure(client: SandboxClient, name: str, cells: int, rounds: int) -> dict[str, float | str]:
    def taken(work: Callable[..., Awaitable[float]], *arguments: object) -> Callable[[], float]:
        return lambda: asyncio.run(work(client, CELLS[name], *arguments))  # type: ignore[arg-type]

    kinds = {"cell": taken(cell_ms, cells), "first": taken(first_ms)}
    kinds |= {f"replay_{history}": taken(replay_ms, history) for history in HISTORIES}
    by_turns({"cell": taken(cell_ms, 2), "replay": taken(replay_ms, 1)}, range(1))
    found = by_turns(kinds, range(rounds))
    return {"kind": name} | {kind: round(median(each[kind] for each in found), 2) for kind in kinds}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cells", type=int, default=300, help="cells of a session in a round")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    with SandboxClient.start(slots=2) as client:
        rows = list(map(partial(measure, client, cells=options.cells, rounds=options.rounds), CELLS))
        level = client.info().isolation
    print(f"CPU ms, {level}")
    print_rows(rows)
    report(isolation=level, rows=rows)


if __name__ == "__main__":
    main()
