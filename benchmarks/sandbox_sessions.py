"""What a cell of a session costs in CPU. Prints a table and one JSON line.

Every cell is the same small one. CPU is that of this process and of all below it; medians over rounds.

    python benchmarks/sandbox_sessions.py [--cells 300] [--rounds 5]
    python benchmarks/sandbox_sessions.py --forks [--mb 200] [--rounds 3]

With --forks: what a branch of a session costs. A session holds 200 MB of small objects and is forked into 1, 8 and 64
branches; the memory is copied once for all branches, which is most of the CPU where they are few. Memory of a branch is
what `smaps_rollup` says of its process: own pages (USS) and its part of shared ones (PSS), once a cell has run and once
one has read every object, of the eight branches that ran it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from frame import cpu_seconds, parser, print_rows, report, spent

from rocstar.sandbox.call import Limits, ProgramOutcome
from rocstar.sandbox.client import SandboxClient

CELLS = {
    "arithmetic": "n = globals().get('n', 0) + 1\nprint(sum(i * i for i in range(1000)))",
    "numpy": "import numpy as np\na = np.arange(10000.0).reshape(100, 100) + np.eye(100)\nprint(np.linalg.det(a) > 0)",
    "sympy": "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(x * sp.exp(x), x))",
}
LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0)
SETTLE_SECONDS = 1.0  # for the daemon to account for what has ended
BRANCHES = (1, 8, 64)
FORK_LIMITS = Limits(wall_seconds=300.0, cpu_seconds=300.0, memory_bytes=2**30)
HOLD = "held = ['%08d' % n + 'x' * 40 for n in range({})]"
OBJECT_BYTES = 120  # of one, with its place in the list
FORK_CELLS = {"begun": "len(held)", "read": "len([each for each in held if each])"}
"""The second touches every object, and so writes its count of references: nothing of it is shared any more."""
MOST_MEASURED = 8  # branches that run these cells


async def cell_ms(client: SandboxClient, cell: str, count: int) -> float:
    """Of one cell, the first two of a session left out."""
    async with client.open_session(limits=LIMITS, seed=1) as session:

        async def run(count: int) -> None:
            for _ in range(count):
                response = await session.run(cell)
                assert response.outcome is ProgramOutcome.OK and response.replayed_cells == 0, response

        await run(2)
        with spent(lambda: cpu_seconds(os.getpid())) as seconds:
            await run(count)
    return 1000 * seconds.cpu / count


def cell_row(client: SandboxClient, name: str, cells: int, rounds: int) -> dict[str, float | str]:
    """The first session, which brings everything up, is not counted."""
    asyncio.run(cell_ms(client, CELLS[name], 2))
    found = [asyncio.run(cell_ms(client, CELLS[name], cells)) for _ in range(rounds)]
    return {"kind": name, "cell": round(median(found), 2)}


def branch_memory() -> list[tuple[float, float]]:
    """USS and PSS of each, MB: those that map a copy."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if "rocstar-branch" in Path(f"/proc/{process.pid}/maps").read_text():
            memory = process.memory_full_info()
            found.append((memory.uss / 2**20, memory.pss / 2**20))
    return found


async def forked(client: SandboxClient, mb: int, count: int) -> dict[str, float]:
    async with client.open_session(limits=FORK_LIMITS, seed=1) as session:
        objects = mb * 2**20 // OBJECT_BYTES
        await session.run(HOLD.format(objects))
        await asyncio.sleep(SETTLE_SECONDS)
        with spent(lambda: cpu_seconds(os.getpid())) as seconds:
            branches = await session.fork(count)
        figures = {"cpu_ms": 1000 * seconds.cpu / count}
        for name, code in FORK_CELLS.items():
            cells = [await branch.run(code) for branch in branches[:MOST_MEASURED]]
            assert {response.value for response in cells} == {str(objects)}, cells
            memory = sorted(branch_memory())[-MOST_MEASURED:]
            figures |= {
                f"uss_mb_{name}": mean(uss for uss, _ in memory),
                f"pss_mb_{name}": mean(pss for _, pss in memory),
            }
        for branch in branches:
            await branch.close()
    await asyncio.sleep(SETTLE_SECONDS)
    return figures


def fork_rows(client: SandboxClient, mb: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for count in BRANCHES:
        found = [asyncio.run(forked(client, mb, count)) for _ in range(rounds)]
        rows.append({"branches": count} | {key: round(median(each[key] for each in found), 1) for key in found[0]})
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cells", type=int, default=300, help="cells of a session in a round")
    arguments.add_argument("--forks", action="store_true", help="branches of a session instead of its cells")
    arguments.add_argument("--mb", type=int, default=200, help="what the session holds that is forked")
    arguments.add_argument("--rounds", type=int, help="5; with --forks 3")
    options = arguments.parse_args()
    rounds = options.rounds or (3 if options.forks else 5)
    more = {"preload": ()} if options.forks else {}
    with SandboxClient.start(slots=2, **more) as client:
        level = client.info().isolation
        if options.forks:
            rows = fork_rows(client, options.mb, rounds)
        else:
            rows = [cell_row(client, name, options.cells, rounds) for name in CELLS]
    print(f"of one branch, {level}" if options.forks else f"CPU ms, {level}")
    print_rows(rows)
    report(isolation=level, rows=rows, **({"mb": options.mb} if options.forks else {}))


if __name__ == "__main__":
    main()
