"""Ten thousand hostile answers: does each get a verdict inside its deadline, with no worker lost and memory flat?

Every answer is another one, so nothing is remembered. Fewer are in flight at a time than there are workers. References
are formulas, so that nothing is settled by comparing numbers. The deadline counts from the moment a worker takes the
question; an answer that follows killed workers also waits for a new one, whose start is measured first. Prints a table
by kind, the memory at ten moments, and last one JSON line; exit code 1 when something went wrong.

    python benchmarks/verify_hostile.py [--answers 10000] [--deadline 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.answers.extract import lenient_answer
from rocstar.answers.grade import Grader, Pair
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.errors import VerifierUnavailable
from rocstar.types import Verdict

SEED = 20250828
GOLDS = (
    r"\sqrt{2}",
    "x+1",
    r"(1, \frac{\pi}{2})",
    r"\{1, 2, 3\}",
    r"\frac{3}{7}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
)
STARTS = 3  # an answer may wait for a start that waits for another's CPU, on a machine shared with others
RARE = ("powers of polynomials", "trigonometry")  # seconds of honest algebra each, so fewer of them
RARE_EVERY = 40
PAGE = os.sysconf("SC_PAGE_SIZE")
Draw = random.Random
Maker = Callable[[Draw], str]


def number(draw: Draw) -> int:
    return draw.randint(2, 99_999)


def nested(opening: str, closing: str, deep: int) -> str:
    return opening * deep + "x" + closing * deep


def tower(draw: Draw) -> str:
    return "^{".join(str(draw.randint(2, 99)) for _ in range(draw.randint(3, 30))) + "}" * draw.randint(0, 30)


def bare_tower(draw: Draw) -> str:
    return f"({number(draw)}^{draw.randint(2, 9)})^({draw.randint(10, 99)}^{draw.randint(2, 9)})"


def hidden_tower(draw: Draw) -> str:
    """Powers of sums, which no scan of the text sees through."""
    return f"(1+{number(draw)})^{{{number(draw)}+{number(draw)}}}" + f"^{{{draw.randint(2, 9)}+1}}" * draw.randint(0, 2)


def matrix(draw: Draw) -> str:
    rows, columns = draw.randint(2, 60), draw.randint(2, 60)
    row = "&".join(str(draw.randint(0, 9)) for _ in range(columns))
    return r"\begin{pmatrix}" + r"\\".join([row] * rows) + r"\end{pmatrix}"


def noise(draw: Draw) -> str:
    return "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.randint(1, 400)))


def controls(draw: Draw) -> str:
    return "".join(chr(draw.randrange(0, 32)) for _ in range(draw.randint(1, 300))) + "\ud800\uffff" + str(number(draw))


def megabyte(draw: Draw) -> str:
    unit = draw.choice(["{x}", "\\frac{1}{2}+", "\\left(", "\\boxed{", "7", "$", "\\text{and}", "answer is "])
    return unit * (1_000_000 // len(unit)) + str(number(draw))


def unbalanced(draw: Draw) -> str:
    return "".join(draw.choice("{}()[]\\$^_&" + "x1") for _ in range(draw.randint(1, 1500)))


def commands(draw: Draw) -> str:
    words = (
        "\\sum_{k=0}^{%d}",
        "\\int_0^{%d}",
        "\\prod_{i=1}^{%d}",
        "\\lim_{x\\to %d}",
        "\\binom{%d}{7}",
        "\\sqrt[%d]{x}",
        "\\log_{%d}",
    )
    return " ".join(draw.choice(words) % number(draw) for _ in range(draw.randint(1, 12))) + " k^2"


def polynomial(draw: Draw) -> str:
    return "".join(f"(x+{number(draw)})^{{{draw.randint(50, 3000)}}}" for _ in range(draw.randint(1, 8)))


def trigonometry(draw: Draw) -> str:
    return "+".join(
        f"\\sin^{{{draw.randint(2, 99)}}}({number(draw)}x)\\cos(y^{draw.randint(2, 9)})"
        for _ in range(draw.randint(1, 12))
    )


def long_list(draw: Draw) -> str:
    return ", ".join(f"{number(draw)}\\sqrt{{{draw.randint(2, 99)}}}" for _ in range(draw.randint(10, 90)))


KINDS: dict[str, Maker] = {
    "tower of powers": tower,
    "tower in brackets": bare_tower,
    "tower of sums": hidden_tower,
    "factorials": lambda draw: "(" * 5 + f"{number(draw)}!" + ")!" * draw.randint(1, 5),
    "small factorials": lambda draw: f"({draw.randint(7, 12)}!+{number(draw)})!",
    "deep brackets": lambda draw: nested("(", ")", draw.randint(20, 900)) + str(number(draw)),
    "deep fractions": lambda draw: nested(f"\\frac{{{number(draw)}}}{{", "}", draw.randint(10, 120)),
    "deep roots": lambda draw: nested("\\sqrt{" + str(number(draw)) + "+", "}", draw.randint(10, 120)),
    "one megabyte": megabyte,
    "control characters": controls,
    "random letters": noise,
    "right-to-left marks": lambda draw: "".join(draw.choices("\u202e\u202b\u200f\u2067x+1", k=300)) + str(number(draw)),
    "unbalanced braces": unbalanced,
    "huge matrices": matrix,
    "sums, integrals, limits": commands,
    "powers of polynomials": polynomial,
    "trigonometry": trigonometry,
    "long lists": long_list,
    "long digits": lambda draw: str(draw.getrandbits(draw.randint(100, 6000))) + "x",
    "python": lambda draw: f"__import__('os').abort() or {number(draw)}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    kind: str
    verdict: Verdict
    method: str
    seconds: float
    """Wall time from the question to the verdict, seconds."""


def answers(count: int, draw: Draw) -> list[tuple[str, str, str]]:
    """(kind, gold, text): half in a box, half as running text after "the answer is"."""
    found = []
    common = [kind for kind in KINDS if kind not in RARE]
    for at in range(count):
        kind = RARE[at // RARE_EVERY % len(RARE)] if at % RARE_EVERY == 0 else common[at % len(common)]
        written = KINDS[kind](draw)
        text = f"so \\boxed{{{written}}}" if at % 2 else f"the answer is {written}"
        # Extraction may refuse the text; then the bare answer is compared, so that no kind ends there.
        found.append((kind, GOLDS[at % len(GOLDS)], text if lenient_answer(text) else written))
    draw.shuffle(found)
    return found


async def ask(grader: Grader, kind: str, gold: str, text: str) -> Result:
    started = time.perf_counter()
    found = lenient_answer(text)
    grade = await grader.grade(gold, text if found is None else found)
    return Result(kind, grade.verdict, grade.method, time.perf_counter() - started)


async def run(todo: list[tuple[str, str, str]], deadline: float, workers: int, streams: int) -> dict[str, Any]:
    checker = SymbolicChecker(deadline_seconds=deadline, workers=workers)
    grader = Grader(checker)
    started = time.perf_counter()
    await grader.grade("x", "y")
    start_seconds = time.perf_counter() - started
    await grader.grade_all([Pair(gold="a+b", predicted=f"{n}b+a") for n in range(16 * workers)])
    results: list[Result] = []
    unavailable: list[str] = []
    memory: list[dict[str, float]] = []
    queue = list(reversed(todo))

    async def stream() -> None:
        while queue:
            kind, gold, text = queue.pop()
            try:
                results.append(await ask(grader, kind, gold, text))
            except VerifierUnavailable as error:
                unavailable.append(f"{kind}: {error}")
            if len(results) % max(1, len(todo) // 10) == 0:
                memory.append({"done": len(results), **megabytes(checker)})

    await asyncio.gather(*(stream() for _ in range(streams)))
    alive = await asyncio.gather(*(grader.grade(f"c+{n}", f"{n}+c") for n in range(100, 100 + 4 * workers)))
    found = figures(results, unavailable, memory, deadline, start_seconds)
    found["workers_alive"] = len(checker.worker_pids())
    found["right_afterwards"] = sum(grade.verdict is Verdict.RIGHT for grade in alive) / len(alive)
    await grader.close()
    return found


def megabytes(checker: SymbolicChecker) -> dict[str, float]:
    return {
        "parent_mb": resident(os.getpid()),
        "workers_mb": round(sum(resident(pid) for pid in checker.worker_pids()), 1),
    }


def resident(pid: int) -> float:
    try:
        return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20, 1)
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def figures(
    results: list[Result], unavailable: list[str], memory: list[dict[str, float]], deadline: float, start_seconds: float
) -> dict[str, Any]:
    times = sorted(result.seconds for result in results)
    kinds = {}
    for kind in KINDS:
        mine = [result for result in results if result.kind == kind]
        kinds[kind] = {
            "answers": len(mine),
            **{str(verdict): sum(result.verdict is verdict for result in mine) for verdict in Verdict},
            "median_ms": round(1000 * statistics.median(result.seconds for result in mine), 2) if mine else None,
            "max_s": round(max((result.seconds for result in mine), default=0.0), 2),
            "methods": dict(Counter(result.method for result in mine).most_common(4)),
        }
    return {
        "answers": len(results) + len(unavailable),
        "verdicts": len(results),
        "unavailable": unavailable[:10],
        "deadline_s": deadline,
        "limits_hit": sum(result.method in ("deadline", "memory") for result in results),
        "worker_start_s": round(start_seconds, 2),
        "over_deadline_and_start": sum(seconds > deadline + STARTS * start_seconds for seconds in times),
        "p50_ms": round(1000 * times[len(times) // 2], 2),
        "p99_s": round(times[int(0.99 * len(times))], 2),
        "max_s": round(times[-1], 2),
        "memory": memory,
        "kinds": kinds,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'kind':26}{'answers':>8}{'right':>7}{'wrong':>7}{'undecided':>11}{'median ms':>11}{'max s':>8}  methods")
    for kind, row in found["kinds"].items():
        methods = " ".join(f"{method}={count}" for method, count in row["methods"].items())
        print(f"{kind:26}{row['answers']:>8}{row['right']:>7}{row['wrong']:>7}{row['undecided']:>11}"
              f"{row['median_ms']!s:>11}{row['max_s']:>8}  {methods}")  # fmt: skip
    for moment in found["memory"]:
        print(f"after {moment['done']:>6}: parent {moment['parent_mb']} MB, workers {moment['workers_mb']} MB")
    for key, value in found.items():
        if key not in ("kinds", "memory"):
            print(f"{key.replace('_', ' ')}: {value}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=2, help="answers in flight")
    options = parser.parse_args()
    started = time.perf_counter()
    found = asyncio.run(run(answers(options.answers, Draw(SEED)), options.deadline, options.workers, options.streams))
    found["seconds"] = round(time.perf_counter() - started, 1)
    show(found)
    print()
    print(json.dumps({"benchmark": "verify_hostile", **found}))
    bad = found["unavailable"] or found["over_deadline_and_start"] or found["right_afterwards"] < 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
