"""How much CPU does a verdict cost, beside math-verify alone?

The pool is every integer reference answer of deepscaler, math, aime, gsm8k and deepmath (of ../shared/data, or of
$ROCSTAR_DATA), each as a pair (gold, gold) and a pair (gold, one digit changed); the prediction stands in a short text
with a box, so extraction is part of the price on both sides. math-verify runs on a sample, warm, in this process, with
its timeouts off (they cost more). Then the price of each path, on the references that are no plain numbers. Prints two
tables and last one JSON line.

    python benchmarks/verify_throughput.py [--library-pairs 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rocstar.answers.extract import lenient_answer
from rocstar.answers.grade import Grader, Pair
from rocstar.answers.mathverify import grade_math_verify
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


def data_folder() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ROCSTAR_DATA", beside))


def references(folder: Path) -> Iterator[str]:
    for name, column in SOURCES:
        with gzip.open(folder / name / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                yield str(json.loads(line)[column]).rpartition("####")[2].strip()


def with_a_digit_changed(answer: str, draw: random.Random) -> str:
    at = draw.choice([place for place, letter in enumerate(answer) if letter.isdigit()])
    return answer[:at] + draw.choice([digit for digit in "123456789" if digit != answer[at]]) + answer[at + 1 :]


def texts(golds: Sequence[str], draw: random.Random) -> dict[str, Texts]:
    written = "Adding both parts gives the result. Therefore the answer is $\\boxed{{{}}}$."
    return {
        "gold, gold": [(gold, written.format(gold)) for gold in golds],
        "gold, perturbed": [(gold, written.format(with_a_digit_changed(gold, draw))) for gold in golds],
    }


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


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
        mine, verdicts = cpu(lambda pairs=pairs: ours(pairs))
        some = pairs[:sample]
        theirs, other = cpu(lambda some=some: library(some))
        found[kind] = {
            "pairs": len(pairs),
            "verdicts": dict(Counter(map(str, verdicts))),
            "ours_us": round(1e6 * mine / len(pairs), 1),
            "math_verify_us": round(1e6 * theirs / len(some), 1),
            "times": round(theirs / len(some) / (mine / len(pairs)), 1),
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
        seconds, _ = cpu(lambda grader=grader, pairs=pairs: [grader(a, b) for a, b in pairs])
        found[name] = round(1e6 * seconds / len(pairs), 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library-pairs", type=int, default=3000)
    parser.add_argument("--formulas", type=int, default=300)
    options = parser.parse_args()
    folder = data_folder()
    if not (folder / "deepscaler").is_dir():
        print(f"no data in {folder}; set ROCSTAR_DATA to the data folder.", file=sys.stderr)
        return 3
    logging.disable(logging.CRITICAL)  # the library warns that its timeouts are off
    draw = random.Random(SEED)
    answers = list(references(folder))
    golds = [answer for answer in answers if INTEGER.fullmatch(answer)]
    formulas = [
        a
        for a in sorted(set(answers))
        if "\\" in a and len(a) < 80 and re.search(r"\d", a) and not compare_numbers(a, a)
    ]
    draw.shuffle(golds)
    result = race(texts(golds, draw), options.library_pairs)
    print(f"{'pairs':18}{'number':>8}{'ours us':>10}{'math-verify us':>16}{'times':>8}   verdicts")
    for kind, row in result.items():
        print(
            f"{kind:18}{row['pairs']:>8}{row['ours_us']:>10}{row['math_verify_us']:>16}{row['times']:>8}"
            f"   {row['verdicts']}"
        )
    prices = paths(golds, draw.sample(formulas, min(options.formulas, len(formulas))), draw)
    print(f"\n{'path':24}{'CPU us per verdict':>20}")
    for name, price in prices.items():
        print(f"{name:24}{price:>20}")
    print()
    print(json.dumps({"benchmark": "verify_throughput", "race": result, "paths_us": prices}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
