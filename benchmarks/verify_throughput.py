"""How much CPU does a verdict cost, beside math-verify alone?

The pool is every integer reference answer of deepscaler, math, aime, gsm8k and deepmath (of ../shared/data, or of
$ROCSTAR_DATA), each as a pair (gold, gold) and a pair (gold, one digit changed); the prediction stands in a short text
with a box, so extraction is part of the price on both sides. math-verify runs on a sample, warm, in this process, with
its timeouts off (they cost more). Then the price of each path, on the references that are no plain numbers. Prints two
tables and last one JSON line.

    python benchmarks/verify_throughput.py [--library-pairs 3000]
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from frame import Table, data_folder, parser, read_rows, report, spent

from rocstar.answers.extract import lenient_answer
from rocstar.answers.grade import Grader, Pair
from rocstar.answers.judge import grade_math_verify
from rocstar.answers.numbers import compare_numbers
from rocstar.answers.prime import grade_prime
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.answers.text import compare_text
from rocstar.answers.wording import clean
from rocstar.types import Verdict

SOURCES = (("deepscaler", "answer"), ("math", "answer"), ("aime_1983_2023", "answer"), ("gsm8k", "answer"),
           ("deepmath", "ground_truth"))  # fmt: skip
INTEGER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)")
SEED = 20250828
Texts = list[tuple[str, str]]  # gold, what the model wrote


def references(folder: Path) -> Iterator[str]:
    for name, column in SOURCES:
        for row in read_rows(folder / name / "train.jsonl.gz"):
            yield str(row[column]).rpartition("####")[2].strip()


def with_a_digit_changed(answer: str, draw: random.Random) -> str:
    at = draw.choice([place for place, letter in enumerate(answer) if letter.isdigit()])
    return answer[:at] + draw.choice([digit for digit in "123456789" if digit != answer[at]]) + answer[at + 1 :]


def texts(golds: Sequence[str], draw: random.Random) -> dict[str, Texts]:
    written = "Adding both parts gives the result. Therefore the answer is $\\boxed{{{}}}$."
    return {
        "gold, gold": [(gold, written.format(gold)) for gold in golds],
        "gold, perturbed": [(gold, written.format(with_a_digit_changed(gold, draw))) for gold in golds],
    }


def ours(pairs: Texts) -> list[Verdict]:
    """One call for all, as for a step. Whatever is left for the workers would be seen as a method of theirs."""

    async def all_at_once() -> list[Verdict]:
        grader = Grader(SymbolicChecker(workers=1))
        grades = await grader.grade_all([Pair(gold=gold, predicted=lenient_answer(text)) for gold, text in pairs])
        await grader.close()
        assert not {grade.method for grade in grades} & {"prime", "math_verify"}, "not all were plain numbers"
        return [grade.verdict for grade in grades]

    return asyncio.run(all_at_once())


def library(pairs: Texts) -> list[Verdict]:
    from math_verify import parse, verify

    found = []
    for gold, text in pairs:
        wanted, given = parse(f"${gold}$", parsing_timeout=None), parse(text, parsing_timeout=None)
        found.append(Verdict.RIGHT if verify(wanted, given, timeout_seconds=None) else Verdict.WRONG)
    return found


def race(pool: dict[str, Texts], sample: int) -> dict[str, Any]:
    """Microseconds of CPU per verdict, ours and the library's, by kind of pair."""
    library(pool["gold, gold"][:50])  # grammars and patterns are built
    found = {}
    for kind, pairs in pool.items():
        with spent() as mine:
            verdicts = ours(pairs)
        some = pairs[:sample]
        with spent() as theirs:
            other = library(some)
        found[kind] = {
            "pairs": len(pairs),
            "verdicts": dict(Counter(map(str, verdicts))),
            "ours_us": round(1e6 * mine.cpu / len(pairs), 1),
            "math_verify_us": round(1e6 * theirs.cpu / len(some), 1),
            "times": round(theirs.cpu / len(some) / (mine.cpu / len(pairs)), 1),
            "same_verdict": sum(a is b for a, b in zip(verdicts, other, strict=False)),
            "compared": len(some),
        }
    return found


def paths(golds: Sequence[str], formulas: Sequence[str], draw: random.Random) -> dict[str, float]:
    """Mean CPU microseconds per verdict of each grader, in this process, on pairs that it would be asked about."""
    changed = [(formula, with_a_digit_changed(formula, draw)) for formula in formulas]
    same = [(formula, formula + " ") for formula in formulas]
    numbers = [(gold, with_a_digit_changed(gold, draw)) for gold in golds[:5000]]
    todo: dict[str, tuple[Callable[[str, str], Any], Sequence[tuple[str, str]]]] = {
        "numbers": (compare_numbers, numbers),
        "clean": (lambda a, b: (clean(a), clean(b)), same),
        "text": (compare_text, same),
        "prime, equal": (grade_prime, same),
        "prime, changed": (grade_prime, changed),
        "math_verify, equal": (grade_math_verify, same),
        "math_verify, changed": (grade_math_verify, changed),
    }
    found = {}
    for name, (grader, pairs) in todo.items():
        with spent() as seconds:
            for a, b in pairs:
                grader(a, b)
        found[name] = round(1e6 * seconds.cpu / len(pairs), 1)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--library-pairs", type=int, default=3000)
    arguments.add_argument("--formulas", type=int, default=300)
    options = arguments.parse_args()
    logging.disable(logging.CRITICAL)  # the library warns that its timeouts are off
    draw = random.Random(SEED)
    answers = list(references(data_folder()))
    golds = [answer for answer in answers if INTEGER.fullmatch(answer)]
    draw.shuffle(golds)
    result = race(texts(golds, draw), options.library_pairs)
    table = Table("pairs", *next(iter(result.values())))
    for kind, row in result.items():
        table.row(kind, *row.values())
    formulas = [answer for answer in sorted(set(answers)) if is_formula(answer)]
    prices = paths(golds, draw.sample(formulas, min(options.formulas, len(formulas))), draw)
    table = Table("path", "CPU us per verdict")
    for name, price in prices.items():
        table.row(name, price)
    report(race=result, paths_us=prices)


def is_formula(answer: str) -> bool:
    short = "\\" in answer and len(answer) < 80 and bool(re.search(r"\d", answer))
    return short and not compare_numbers(answer, answer)


if __name__ == "__main__":
    main()
