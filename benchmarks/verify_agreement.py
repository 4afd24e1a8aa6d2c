"""How often do our verdicts agree with published answer-equivalence cases, beside math-verify and a PRIME-style grader?

Runs every row of verify/*.jsonl (of ../shared/data, or of $ROCSTAR_DATA), with the options that the row was published
with: `match_types` says whether formulas only or bare numbers too are looked for in running text, `params.strict`
whether names of variables matter, and how far numbers may be off stands in PRECISION where rows lost it. Columns:

    ours         the default graders on the last boxes or what is announced; where these do not accept, math-verify may
                 find the reference in the text
    prime        the PRIME-style grader alone, on the same answers
    math_verify  the library alone: its own extraction and comparison on the untouched texts
    wrapped      the same, with a text that has no formula marks put between dollar signs (most LaTeX rows need that)
    as_reward    the default graders when a prediction without a box must be the answer and nothing else, as in training
    as_it_stands ours without PRECISION

Beside these, and never mixed with them, the parts of answers_judged.jsonl, our own pairs, which three of us judged by
hand: `dev` was looked at when rules were made, `held` was not, and `fresh` was run once before its disagreements were
looked at; `dev2`, `held2` and `dev3`, `held3` are halves of later sets. Only disagreements of `dev`s are printed. All
are answers, no transcripts, and are not searched.

Rules that fit the rows they were made with show on the others: --seeds N splits all rows into random halves N times and
prints both halves of each. --cases FILE adds files of any origin with the columns gold, pred and expected. Prints the
tables, each disagreement, and last one JSON line.

    python benchmarks/verify_agreement.py --seeds 5 --cases elsewhere.jsonl
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

from frame import Table, data_folder, parser, report

from rocstar.answers.cases import Case, load_cases, pair_of, short
from rocstar.answers.grade import DEFAULT, Grade, Grader, Pair
from rocstar.answers.numbers import parse_number
from rocstar.answers.pieces import take_apart
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.answers.wording import clean
from rocstar.data.rows import read_rows
from rocstar.types import Verdict

JUDGED = Path(__file__).with_name("answers_judged.jsonl")
HALVES = ("dev", "held", "fresh", "dev2", "held2", "dev3", "held3")
COLUMNS = ("ours", "prime", "math_verify", "wrapped", "as_reward", "as_it_stands")
MARKS = ("$", "\\(", "\\[", "\\boxed")
WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}")
ANY_NAMES = (*DEFAULT[:-1], "math_verify_any_names")

# The absolute precision that eval/scoring_examples.json of OpenBMB/OlympiadBench (ba5b26a) gives for the answers that
# verify/olympiadbench.jsonl has without it; the two with the same texts differ in nothing else.
PRECISION = {
    "olympiadbench.jsonl": {
        ("7 \\times 10^{35}", "7.1 \\cdot 10^{35}"): [["1e34"], ["1e33"]],
        ("7 \\times 10^{35}, 0.002", "0.001, 7.1 \\cdot 10^{35}"): [["1e34", "1e-3"]],
        ("0.003, 5.233", "0.002, 5.234"): [["1e-3"]],
    }
}


@dataclass(frozen=True, slots=True)
class Row:
    file: str
    case: Case
    grade: Grade
    """Ours."""
    verdicts: dict[str, Verdict]
    """By column."""


def search_of(case: Case) -> str:
    return "latex" if case.columns.get("match_types") == ["latex"] else "all"


def names_matter(case: Case) -> bool:
    return (case.columns.get("params") or {}).get("strict", True) is not False


def library_verdict(case: Case, *, wrap: bool) -> Verdict:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig()] + ([ExprExtractionConfig()] if search_of(case) == "all" else [])
    marked = [text if any(mark in text for mark in MARKS) else f"${text}$" for text in (case.gold, case.text)]
    gold, predicted = (parse(text, kinds) for text in (marked if wrap else (case.gold, case.text)))
    return Verdict.RIGHT if verify(gold, predicted, strict=names_matter(case)) else Verdict.WRONG


def is_found_in(case: Case) -> bool:
    """Whether there is running text, and math-verify, by its own rules, finds the reference in it."""
    gold = pair_of(case).gold
    searched = replace(case, gold=gold if any(mark in gold for mark in MARKS) else f"${gold}$")
    is_running = "half" not in case.columns and WORD.search(case.text) is not None
    return is_running and library_verdict(searched, wrap=False) is Verdict.RIGHT


def within(pair: Pair, precision: Sequence[str]) -> Grade | None:
    """By the absolute precision of an answer: one for all its numbers or one for each; they may stand in any order."""
    if not precision or pair.predicted is None:
        return None
    texts = [clean(text) for text in (pair.gold, pair.predicted)]
    apart = [None if parse_number(text) else take_apart(text) for text in texts]
    items = [pieces.items if pieces else (text,) for pieces, text in zip(apart, texts, strict=True)]
    wanted, given = ([number.value for item in some if (number := parse_number(item))] for some in items)
    bounds = [Fraction(one) for one in precision] * (len(wanted) if len(precision) == 1 else 1)
    same = len(wanted) == len(given) and any(
        all(abs(a - b) <= bound for a, b, bound in zip(wanted, order, bounds, strict=True))
        for order in permutations(given)
    )
    return Grade(Verdict.RIGHT if same else Verdict.WRONG, "precision", pair.predicted)


def published(file: Path) -> list[Case]:
    """The cases of a file with the precision of each; every entry of PRECISION has to find its row."""
    left = {texts: list(values) for texts, values in PRECISION.get(file.name, {}).items()}
    cases = [
        replace(case, columns={**case.columns, "precision": values.pop(0)})
        if (values := left.get((case.gold, case.text)))
        else case
        for case in load_cases(file, read_rows(file), text="pred", expected="expected")
    ]
    if any(left.values()):
        raise SystemExit(f"{file} lacks rows that PRECISION has: {[texts for texts, values in left.items() if values]}")
    return cases


async def run_case(file: str, case: Case, ours: Grader, free: Grader, prime: Grader) -> Row:
    pair, fused = pair_of(case), ours if names_matter(case) else free
    by_precision = within(pair, case.columns.get("precision", ()))
    (plain,) = await fused.grade_all([pair])
    (alone,) = await prime.grade_all([pair])
    is_there = plain.verdict is not Verdict.RIGHT and is_found_in(case)
    searched = replace(plain, verdict=Verdict.RIGHT, method="math_verify in the text") if is_there else plain
    grade, reward, alone = by_precision or searched, by_precision or plain, by_precision or alone
    library = [library_verdict(case, wrap=wrap) for wrap in (False, True)]
    found = (grade.verdict, alone.verdict, *library, reward.verdict, searched.verdict)
    return Row(file, case, grade, dict(zip(COLUMNS, found, strict=True)))


async def run_all(files: Sequence[Path]) -> list[Row]:
    shared = SymbolicChecker(workers=1)
    graders = [Grader(shared), Grader(shared, graders=ANY_NAMES), Grader(shared, graders=("prime",))]
    rows = [await run_case(file.name, case, *graders) for file in files for case in published(file)]
    await shared.close()
    return rows


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    agreed = {column: sum(row.verdicts[column] is row.case.expected for row in rows) for column in COLUMNS}
    wrong = [row for row in rows if row.grade.verdict is not row.case.expected]
    return {
        "rows": len(rows),
        **agreed,
        "agreement": round(agreed["ours"] / len(rows), 4),
        "false_right": sum(row.grade.verdict is Verdict.RIGHT for row in wrong),
        "false_wrong": sum(row.grade.verdict is Verdict.WRONG for row in wrong),
        "undecided": sum(row.grade.verdict is Verdict.UNDECIDED for row in rows),
    }


def halves(rows: Sequence[Row], seeds: int) -> dict[str, dict[str, Any]]:
    """Both halves of each random split, by name."""
    parts: dict[str, dict[str, Any]] = {}
    for seed in range(seeds):
        mixed = random.Random(seed).sample(list(rows), len(rows))
        middle = len(rows) // 2
        parts |= {f"seed {seed}, first half": figures(mixed[:middle]), f"seed {seed}, second": figures(mixed[middle:])}
    return parts


def judged_halves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {half: [row for row in rows if row.case.columns["half"] == half] for half in HALVES}


def show(parts: dict[str, dict[str, Any]]) -> None:
    table = Table("file", *next(iter(parts.values())))
    for name, part in parts.items():
        table.row(name, *part.values())


def show_disagreements(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.grade.verdict is not row.case.expected:
            others = ", ".join(f"{column} {row.verdicts[column]}" for column in COLUMNS[1:])
            print(f"\n{row.file} line {row.case.line}: expected {row.case.expected}, ours {row.grade.verdict}"
                  f" by {row.grade.method} ({others})")  # fmt: skip
            print(
                f"  gold {short(row.case.gold)}\n  pred {short(row.case.text)}\n  compared {short(row.grade.extracted)}"
            )


def main() -> None:
    logging.disable(logging.CRITICAL)  # the library warns once per text
    arguments = parser(__doc__)
    arguments.add_argument("--cases", type=Path, nargs="*", default=[], help="further files: gold, pred, expected")
    arguments.add_argument("--seeds", type=int, default=3, help="random splits into halves")
    options = arguments.parse_args()
    files = [*sorted(data_folder("verify").glob("*.jsonl")), *options.cases]
    rows = asyncio.run(run_all(files))
    parts = {file.name: figures([row for row in rows if row.file == file.name]) for file in files}
    parts["all"] = figures(rows)
    parts |= halves(rows, options.seeds)
    judged = judged_halves(asyncio.run(run_all([JUDGED])))
    parts |= {f"judged, {half}": figures(of_half) for half, of_half in judged.items()}
    show(parts)
    show_disagreements([*rows, *judged["dev"], *judged["dev2"], *judged["dev3"]])
    report(**parts)


if __name__ == "__main__":
    main()
