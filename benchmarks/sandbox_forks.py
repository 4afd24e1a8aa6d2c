"""What a branch of a session costs: CPU of everything that serves it, and memory that it does not share.

A session holds 200 MB of small objects and is forked into 1, 8 and 64 branches. CPU is that of this process and of all
below it; the memory is copied once for all branches, which is most of it where they are few. Memory of a branch is what
`smaps_rollup` says of its process: own pages (USS) and its part of shared ones (PSS), once a cell has run and once one
has read every object, of the eight branches that ran it. Prints a table and a JSON line.

    python benchmarks/sandbox_forks.py [--mb 200] [--rounds 3]
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import mean, median

import psutil
from frame import own_tree, parser, print_rows, report, spent

from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient

COUNTS = (1, 8, 64)
LIMITS = Limits(wall_seconds=300.0, cpu_seconds=300.0, memory_bytes=2**30)
HOLD = "held = ['%08d' % n + 'x' * 40 for n in range({})]"
OBJECT_BYTES = 120  # of one, with its place in the list
SETTLE_SECONDS = 1.0  # for what has ended to be accounted for
CELLS = {"begun": "len(held)", "read": "len([each for each in held if each])"}
"""The second touches every object, and so writes its count of references: nothing of it is shared any more."""
MOST_MEASURED = 8  # branches that run these cells


def branch_memory() -> list[tuple[float, float]]:
    """USS and PSS of each, MB: those that map a copy."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if "rocstar-branch" in Path(f"/proc/{process.pid}/maps").read_text():
            memory = process.memory_full_info()
            found.append((memory.uss / 2**20, memory.pss / 2**20))
    return found


async def forked(client: SandboxClient, mb: int, count: int) -> dict[str, float]:
    async with client.open_session(limits=LIMITS, seed=1) as session:
        objects = mb * 2**20 // OBJECT_BYTES
        await session.run(HOLD.format(objects))
        await asyncio.sleep(SETTLE_SECONDS)
        with spent(own_tree) as seconds:
            branches = await session.fork(count)
        figures = {"cpu_ms": 1000 * seconds.cpu / count}
        for name, code in CELLS.items():
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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mb", type=int, default=200, help="what the session holds")
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rows = []
    with SandboxClient.start(slots=2, preload=()) as client:
        level = client.info().isolation
        for count in COUNTS:
            found = [asyncio.run(forked(client, options.mb, count)) for _ in range(options.rounds)]
            rows.append({"branches": count} | {key: round(median(each[key] for each in found), 1) for key in found[0]})
    print(f"of one branch, {level}")
    print_rows(rows)
    report(isolation=level, mb=options.mb, rows=rows)


if __name__ == "__main__":
    main()
