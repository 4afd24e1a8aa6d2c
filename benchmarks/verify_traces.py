"""Our verdicts against those recorded with published model transcripts: a confusion table, and each disagreement.

Two sets under traces/ (of ../shared/data, or of $ROCSTAR_DATA): qwen25_math_cot (8 solutions a problem, a rule's
verdict each) and gsm8k_model_solutions (4 models, `is_correct`). Texts go through the lenient extraction of rewards and
the default graders. Prints a table and the disagreements by cause, and last one JSON line.

    python benchmarks/verify_traces.py
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frame import Table, data_folder, read_rows, report

from rocstar.answers.cases import Case, pair_of, short
from rocstar.answers.extract import lenient_answer
from rocstar.answers.grade import Grade, Grader
from rocstar.types import Verdict

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
QWEN, GSM8K = "qwen25_math_cot/math_cot_100.jsonl.gz", "gsm8k_model_solutions/example_model_solutions.jsonl.gz"
Judged = tuple[Case, Grade]


def qwen_cases(folder: Path) -> list[Case]:
    return [
        Case(line=line, text=text, gold=row["gt"], expected=verdict_of(right))
        for line, row in enumerate(read_rows(folder / QWEN), 1)
        for text, right in zip(row["code"], row["score"], strict=True)
    ]


def gsm8k_cases(folder: Path) -> list[Case]:
    return [
        Case(
            line=line,
            text=row[model]["solution"],
            gold=lenient_answer(row["ground_truth"]) or row["ground_truth"],
            expected=verdict_of(row[model]["is_correct"]),
        )
        for line, row in enumerate(read_rows(folder / GSM8K), 1)
        for model in MODELS
    ]


def verdict_of(right: bool) -> Verdict:
    return Verdict.RIGHT if right else Verdict.WRONG


async def judge(cases: Sequence[Case]) -> list[Judged]:
    grader = Grader()
    grades = await grader.grade_all([pair_of(case) for case in cases])
    await grader.close()
    return list(zip(cases, grades, strict=True))


def cause(case: Case, grade: Grade) -> str:
    """Why a verdict differs, in words; by what was compared, not by which case it is."""
    if grade.verdict is Verdict.UNDECIDED:
        return f"undecided: {grade.method}"
    if grade.method == "no_answer":
        return "no answer was announced in the text"
    if grade.verdict is Verdict.RIGHT:
        return f"recorded wrong though equal ({grade.method}): {short(grade.extracted)} for {short(case.gold)}"
    return f"recorded right though different ({grade.method}): {short(grade.extracted)} for {short(case.gold)}"


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    table = Counter(f"recorded_{case.expected}_ours_{grade.verdict}" for case, grade in judged)
    disagreements = Counter(cause(case, grade) for case, grade in judged if grade.verdict is not case.expected)
    return {
        "texts": len(judged),
        **{key: table[key] for key in (f"recorded_{a}_ours_{b}" for a in ("right", "wrong") for b in Verdict)},
        "agreement": round(1 - disagreements.total() / len(judged), 4),
        "methods": dict(Counter(grade.method for _, grade in judged).most_common()),
        "disagreements": dict(disagreements.most_common()),
    }


def show(name: str, part: dict[str, Any]) -> None:
    print(f"\n{name}: {part['texts']} texts, agreement {part['agreement']:.2%}")
    table = Table("recorded", *(f"ours {verdict}" for verdict in Verdict))
    for recorded in ("right", "wrong"):
        table.row(recorded, *(part[f"recorded_{recorded}_ours_{verdict}"] for verdict in Verdict))
    for reason, count in part["disagreements"].items():
        print(f"  {count} x {reason}")


def main() -> None:
    folder = data_folder("traces")
    sets = {"qwen25_math_cot": qwen_cases(folder), "gsm8k_model_solutions": gsm8k_cases(folder)}
    parts = {name: figures(asyncio.run(judge(cases))) for name, cases in sets.items()}
    for name, part in parts.items():
        show(name, part)
    report(**parts)


if __name__ == "__main__":
    main()
