"""How often do our verdicts agree with published answer-equivalence cases?

Runs every row of verify/*.jsonl (of ../shared/data, or of $ROCSTAR_DATA). A prediction that holds a box is reduced to
its last box, as for a reward; one without is graded as running text (`prose`), since many rows are whole foreign
transcripts. The column `as_reward` counts agreement when those too must be an answer and nothing else, which is all
that rewards accept. Prints one table, each disagreement, and last one JSON line.

    python benchmarks/verify_agreement.py
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.answers.extract import last_box
from rocstar.answers.grade import Grade, Grader
from rocstar.types import Verdict

SHOWN_CHARS = 90


@dataclass(frozen=True, slots=True)
class Case:
    file: str
    gold: str
    predicted: str
    expected: Verdict
    grade: Grade
    """The last box, or without any box the whole prediction as running text."""
    as_reward: Verdict
    """The same with running text refused."""
    seconds: float
    """Wall time of the refusing grade, seconds."""

    @property
    def agrees(self) -> bool:
        return self.grade.verdict is self.expected


def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ROCSTAR_DATA", beside)) / "verify"


async def run_case(grader: Grader, file: str, row: dict[str, Any]) -> Case:
    gold, predicted = row["gold"], row["pred"]
    box = last_box(predicted)
    started = time.perf_counter()
    as_reward = await grader.grade(gold, predicted if box is None else box)
    seconds = time.perf_counter() - started
    grade = await grader.grade(gold, predicted, prose=True) if box is None else as_reward
    expected = Verdict.RIGHT if row["expected"] else Verdict.WRONG
    return Case(file, gold, predicted, expected, grade, as_reward.verdict, seconds)


async def run_all(files: list[Path]) -> list[Case]:
    grader = Grader()
    await grader.grade("x", "y")  # starts the symbolic process, which is not what is timed
    cases = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            cases.append(await run_case(grader, file.name, json.loads(line)))
    await grader.close()
    return cases


def figures(cases: list[Case]) -> dict[str, Any]:
    agreed = sum(case.agrees for case in cases)
    return {
        "rows": len(cases),
        "agreed": agreed,
        "agreement": round(agreed / len(cases), 4),
        "false_right": sum(not case.agrees and case.grade.verdict is Verdict.RIGHT for case in cases),
        "false_wrong": sum(not case.agrees and case.grade.verdict is Verdict.WRONG for case in cases),
        "undecided": sum(case.grade.verdict is Verdict.UNDECIDED for case in cases),
        "as_reward": sum(case.as_reward is case.expected for case in cases),
        "methods": dict(Counter(case.grade.method for case in cases).most_common()),
    }


def milliseconds(cases: list[Case]) -> dict[str, float]:
    """Median wall time of one grade, milliseconds, for plain numbers and for math-verify."""
    kinds = {"number_ms": ("integer", "number"), "symbolic_ms": ("math_verify",)}
    return {
        kind: round(1000 * statistics.median(case.seconds for case in cases if case.grade.method in methods), 3)
        for kind, methods in kinds.items()
    }


def show(parts: dict[str, dict[str, Any]]) -> None:
    columns = ("rows", "agreed", "agreement", "false_right", "false_wrong", "undecided", "as_reward")
    print(f"{'file':22}" + "".join(f"{name:>13}" for name in columns) + "  methods")
    for name, part in parts.items():
        methods = " ".join(f"{method}={count}" for method, count in part["methods"].items())
        print(f"{name:22}" + "".join(f"{part[column]:>13}" for column in columns) + "  " + methods)


def show_disagreements(cases: list[Case]) -> None:
    for case in cases:
        if not case.agrees:
            gold, predicted = case.gold[-SHOWN_CHARS:], case.predicted[-SHOWN_CHARS:]
            print(f"\n{case.file}: expected {case.expected}, got {case.grade.verdict} by {case.grade.method}")
            print(f"  gold {gold!r}\n  pred {predicted!r}\n  compared {str(case.grade.extracted)[-SHOWN_CHARS:]!r}")


def main() -> int:
    files = sorted(data_folder().glob("*.jsonl"))
    if not files:
        print(f"no cases in {data_folder()}; set ROCSTAR_DATA to the data folder.", file=sys.stderr)
        return 3
    cases = asyncio.run(run_all(files))
    parts = {file.name: figures([case for case in cases if case.file == file.name]) for file in files}
    parts["all"] = figures(cases)
    show(parts)
    show_disagreements(cases)
    print()
    print(json.dumps({"benchmark": "verify_agreement", **parts, **milliseconds(cases)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
