"""HumanEval and MBPP: do the reference solutions pass their own tests in the sandbox, and what does each cost? Prints a
table, those that did not pass with the reason, and last one JSON line.

The problems lie in code_exec/ of ../shared/data or of $ROCSTAR_DATA. A program passes when it ends with `ok` and
printed the mark that stands after its last test, so one that leaves before its tests does not pass.

    python benchmarks/sandbox_code.py [--slots 2]
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import at_once, data_folder, own_tree, parser, print_rows, read_rows, report, spent

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


def programs(path: Path) -> Iterator[tuple[str, str]]:
    """Name and source, tests included, of each problem."""
    for row in read_rows(path):
        tests = humaneval(row) if "entry_point" in row else mbpp(row)
        yield str(row["task_id"]), f"{tests}\nprint({PASSED!r})\n"


def humaneval(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})"


def mbpp(row: Mapping[str, Any]) -> str:
    """The challenge tests, which a few problems have, included."""
    return "\n".join([row["code"], row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]])


async def run_all(client: SandboxClient, path: Path) -> list[Tested]:
    async def one(program: tuple[str, str]) -> Tested:
        name, code = program
        return Tested(name=name, response=await client.run(Call(id=name, code=code, limits=LIMITS, seed=0)))

    return await at_once(IN_FLIGHT, one, programs(path))


def measure(client: SandboxClient, name: str, path: Path) -> tuple[dict[str, Any], list[Tested]]:
    """A row of the table, and what did not pass."""
    with spent(own_tree) as seconds:
        tested = asyncio.run(run_all(client, path))
    failed = [each for each in tested if not each.passed]
    row = {
        "set": name,
        "programs": len(tested),
        "passed": len(tested) - len(failed),
        "cpu_ms_per_program": round(1000 * seconds.cpu / len(tested), 2),
        "programs_per_second": round(len(tested) / seconds.wall, 1),
    }
    return row, failed


def reason(response: Response) -> str:
    if response.exception:
        return f"{response.exception.type} in line {response.exception.line}: {response.exception.message[:120]}"
    return f"{response.outcome} {response.kill_reason}{response.message}".strip()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--slots", type=int, default=2)
    options = arguments.parse_args()
    folder = data_folder("code_exec")
    rows, failed = [], {}
    with SandboxClient.start(slots=options.slots, preload=()) as client:
        level = client.info().isolation
        for name, file in SETS.items():
            row, failed[name] = measure(client, name, folder / file)
            rows.append(row)
    print_rows(rows)
    not_passed = {f"{name} {each.name}": reason(each.response) for name in failed for each in failed[name]}
    for name, why in not_passed.items():
        print(f"{name}: {why}")
    report(isolation=level, rows=rows, not_passed=not_passed)


if __name__ == "__main__":
    main()
