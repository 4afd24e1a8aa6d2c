"""HumanEval and MBPP: do the reference solutions pass their own tests in the sandbox, and what does each cost? Prints a
table, those that did not pass with the reason, and last one JSON line.

The problems lie in code_exec/ of ../shared/data or of $ROCSTAR_DATA. A program passes when it ends with `ok` and
printed the mark that stands after its last test, so one that leaves before its tests does not pass.

    python benchmarks/sandbox_code.py [--slots 2]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu import cpu_seconds

from rocstar.sandbox.call import Call, Limits, ProgramOutcome, Response
from rocstar.sandbox.client import SandboxClient

SETS = {"HumanEval": "HumanEval.jsonl.gz", "MBPP": "mbpp.jsonl.gz"}
LIMITS = Limits(wall_seconds=30.0, cpu_seconds=30.0)  # a busy machine must not fail a right program
IN_FLIGHT = 8
PASSED = "every test passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    name: str
    """Of the problem, as its set calls it."""
    response: Response

    @property
    def passed(self) -> bool:
        return self.response.outcome is ProgramOutcome.OK and self.response.stdout.endswith(PASSED + "\n")


def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ROCSTAR_DATA", beside)) / "code_exec"


def programs(path: Path) -> Iterator[tuple[str, str]]:
    """Name and source, tests included, of each problem."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            tests = humaneval(row) if "entry_point" in row else mbpp(row)
            yield str(row["task_id"]), f"{tests}\nprint({PASSED!r})\n"


def humaneval(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})"


def mbpp(row: Mapping[str, Any]) -> str:
    """The challenge tests, which a few problems have, included."""
    return "\n".join([row["code"], row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])


async def run_all(client: SandboxClient, path: Path) -> list[Tested]:
    turns = asyncio.Semaphore(IN_FLIGHT)

    async def one(name: str, code: str) -> Tested:
        async with turns:
            return Tested(name=name, response=await client.run(Call(id=name, code=code, limits=LIMITS, seed=0)))

    return await asyncio.gather(*(one(name, code) for name, code in programs(path)))


def measure(client: SandboxClient, name: str, path: Path) -> tuple[dict[str, Any], list[Tested]]:
    """A row of the table, and what did not pass."""
    cpu, wall = cpu_seconds(os.getpid()), time.monotonic()
    tested = asyncio.run(run_all(client, path))
    cpu, wall = cpu_seconds(os.getpid()) - cpu, time.monotonic() - wall
    failed = [each for each in tested if not each.passed]
    row = {
        "set": name,
        "programs": len(tested),
        "passed": len(tested) - len(failed),
        "cpu_ms_per_program": round(1000 * cpu / len(tested), 2),
        "programs_per_second": round(len(tested) / wall, 1),
    }
    return row, failed


def reason(response: Response) -> str:
    if response.exception:
        return f"{response.exception.type} in line {response.exception.line}: {response.exception.message[:120]}"
    return f"{response.outcome} {response.kill_reason}{response.message}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    folder = data_folder()
    if not folder.is_dir():
        sys.exit(f"no problems at {folder}; set ROCSTAR_DATA to the folder that has code_exec/")
    rows, failed = [], {}
    with SandboxClient.start(slots=arguments.slots, preload=()) as client:
        level = client.info().isolation
        for name, file in SETS.items():
            row, failed[name] = measure(client, name, folder / file)
            rows.append(row)
    print(f"{'set':<12}{'programs':>9}{'passed':>8}{'CPU ms/program':>16}{'programs/s':>12}")
    for row in rows:
        cells = f"{row['programs']:>9}{row['passed']:>8}{row['cpu_ms_per_program']:>16}{row['programs_per_second']:>12}"
        print(f"{row['set']:<12}{cells}")
    not_passed = {f"{name} {each.name}": reason(each.response) for name in failed for each in failed[name]}
    for name, why in not_passed.items():
        print(f"{name}: {why}")
    summary = {"python": platform.python_version(), "isolation": level, "rows": rows, "not_passed": not_passed}
    print(json.dumps({"benchmark": "sandbox_code", **summary}))


if __name__ == "__main__":
    main()
