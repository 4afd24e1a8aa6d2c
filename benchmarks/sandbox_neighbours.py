"""Does what a program is told depend on its neighbours? Programs of known end, each computing 0.3 s, alone, beside
hostile ones that take all the CPU they can get, and beside as many processes outside the sandbox: the same outcomes, or
`internal`, which is tried elsewhere. Prints a table and, last, one JSON line; the exit code is 1 when one was told
anything else. With `--wall 1` programs wait for a CPU for longer than their limit.

    python benchmarks/sandbox_neighbours.py [--programs 200] [--hostile-per-core 8] [--wall 10] [--no-groups] [--plan 0]
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from frame import parser, print_rows, report
from hostile_programs import BOMB, ORDINARY, Task, ordinary_task
from msgspec import structs

from rocstar.sandbox.call import Call, DaemonSettings, Isolation, Limits, SandboxDown, ServiceOutcome
from rocstar.sandbox.client import SandboxClient

AT_ONCE = 2
TOLD = ("right", "internal", "tried again")
WORK = "import time as _t\nwhile _t.process_time() < 0.3: pass\n"
FAMILY = "import os\nfor _ in range(14):\n    if not os.fork():\n        {first}\n        break\nwhile True: pass"
HOSTILE = {
    "fork bomb": BOMB,
    "fifteen processes compute": FAMILY.format(first="pass"),
    "... each in a session of its own": FAMILY.format(first="os.setsid()"),
    "threads compute": "import threading\ndef f():\n    while True: pass\nfor _ in range(8): "
    "threading.Thread(target=f).start()",
    "memory is taken and given": "while True: bytearray(2**26)",
}


def tasks(number: int, wall_seconds: float) -> list[Task]:
    names = [name for name in ORDINARY if name not in ("numpy", "sympy")]
    made = [ordinary_task(n, names[n % len(names)]) for n in range(1, number + 1)]
    limits = Limits(wall_seconds=wall_seconds, cpu_seconds=60.0)
    return [replace(t, call=structs.replace(t.call, code=WORK + t.call.code, limits=limits)) for t in made]


async def keep_running(client: SandboxClient, code: str) -> None:
    with suppress(SandboxDown):
        while True:
            await client.run(Call(id="hostile", code=code, limits=Limits(wall_seconds=60.0, cpu_seconds=600.0)))


@contextmanager
def busy(number: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


async def judged(client: SandboxClient, work: list[Task]) -> Counter[str]:
    level, rest, told = str(client.info().isolation), iter(work), Counter[str]()

    async def caller() -> None:
        for task in rest:
            response = await client.run(task.call)
            is_internal = response.outcome is ServiceOutcome.INTERNAL
            told["right" if task.passes(response, level) else "internal" if is_internal else f"{response.outcome}"] += 1
            told["tried again"] += response.attempt > 1

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return told


async def compare(client: SandboxClient, work: list[Task], hostile: int) -> dict[str, Counter[str]]:
    seen = {"alone": await judged(client, work)}
    for name, code in HOSTILE.items():
        neighbours = [asyncio.create_task(keep_running(client, code)) for _ in range(hostile)]
        await asyncio.sleep(1.0)
        seen[name] = await judged(client, work)
        for neighbour in neighbours:
            neighbour.cancel()
        await asyncio.gather(*neighbours, return_exceptions=True)
    with busy(hostile):
        seen["processes outside the sandbox"] = await judged(client, work)
    return seen


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--programs", type=int, default=200)
    arguments.add_argument("--hostile-per-core", type=int, default=8)
    arguments.add_argument("--wall", type=float, default=10.0)
    arguments.add_argument("--no-groups", action="store_true")
    arguments.add_argument("--plan", type=int, default=0, help="how many of the stronger plans to skip")
    asked = arguments.parse_args()
    hostile = asked.hostile_per_core * len(os.sched_getaffinity(0))
    settings = DaemonSettings(
        slots=hostile + AT_ONCE,
        preload=(),
        groups=not asked.no_groups,
        skip_plans=asked.plan,
        min_isolation=Isolation.L1,
    )
    with SandboxClient(settings) as client:
        client.launch()
        client.await_hello()
        seen = asyncio.run(compare(client, tasks(asked.programs, asked.wall), hostile))
    wrong = {name: counts.total() - sum(counts[told] for told in TOLD) for name, counts in seen.items()}
    print_rows(
        [
            {"beside": name, **{told: counts[told] for told in TOLD}, "wrong": wrong[name]}
            for name, counts in seen.items()
        ],
        first=34,
    )
    report(neighbours={name: dict(counts) for name, counts in seen.items()}, hostile=hostile, wrong=wrong)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
