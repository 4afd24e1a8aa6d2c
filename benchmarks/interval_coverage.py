"""How often the 95% intervals of an evaluation hold the truth, and whether the paired test keeps its level and power.

An evaluation is simulated: each problem's chance of a right attempt is drawn from a law, each attempt from its chance;
the truth is the mean chance of the law. Six settings are those that issues name; the others were never looked at while
the intervals were chosen. Prints three tables and last one JSON line.

    python benchmarks/interval_coverage.py                       # about two minutes of CPU
    python benchmarks/interval_coverage.py --evaluations 600     # half a minute
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, log, sqrt
from statistics import fmean
from typing import Any

from rocstar.evaluation.intervals import Estimate, mean_over_problems, student
from rocstar.evaluation.paired import Spread, compare_paired, power_of, problems_needed

TRUTH_DRAWS = 400_000  # standard error of the truth: at most 0.0008
LEVEL = 0.05
Law = Callable[[random.Random], float]
"""Draws a problem's chance of a right attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    law: Law
    problems: int
    attempts: int


def mastered(rng: random.Random, share: float = 0.9, chance: float = 1.0) -> float:
    """So many problems have that chance, the others any."""
    return chance if rng.random() < share else rng.random()


def beta(rng: random.Random, a: float, b: float) -> float:
    return rng.betavariate(a, b)


def bimodal(rng: random.Random, low: float = 0.05, high: float = 0.95) -> float:
    return low if rng.random() < 0.5 else high


NAMED = [
    Setting(name="90% mastered, few problems, few attempts", law=mastered, problems=30, attempts=4),
    Setting(name="90% mastered, few problems, many attempts", law=mastered, problems=30, attempts=16),
    Setting(name="90% mastered, many problems", law=mastered, problems=500, attempts=4),
    Setting(name="hard, few problems, many attempts", law=partial(beta, a=0.2, b=1.8), problems=30, attempts=16),
    Setting(name="bimodal, few problems, few attempts", law=bimodal, problems=30, attempts=4),
    Setting(name="mid, many problems, many attempts", law=partial(beta, a=2.0, b=2.0), problems=500, attempts=16),
]
HELD_OUT = [
    Setting(name="80% mastered at 0.99", law=partial(mastered, share=0.8, chance=0.99), problems=40, attempts=8),
    Setting(name="97% mastered at 0.98", law=partial(mastered, share=0.97, chance=0.98), problems=150, attempts=16),
    Setting(name="uniform, very few problems", law=partial(beta, a=1.0, b=1.0), problems=15, attempts=6),
    Setting(name="nearly hopeless", law=partial(beta, a=0.1, b=4.0), problems=60, attempts=32),
    Setting(name="narrow, around 0.7", law=partial(beta, a=14.0, b=6.0), problems=30, attempts=64),
    Setting(name="extremes at 0.01 and 0.99", law=partial(bimodal, low=0.01, high=0.99), problems=90, attempts=3),
    Setting(name="one attempt, few problems", law=partial(beta, a=3.0, b=1.0), problems=30, attempts=1),
    Setting(name="one attempt, many problems", law=partial(beta, a=0.5, b=1.5), problems=674, attempts=1),
]


def means(setting: Setting, rng: random.Random) -> list[float]:
    """Share of right attempts of each problem, in one simulated evaluation."""
    return [right(setting.law(rng), setting.attempts, rng) / setting.attempts for _ in range(setting.problems)]


def right(chance: float, attempts: int, rng: random.Random) -> int:
    return sum(rng.random() < chance for _ in range(attempts))


def plain_t(values: list[float]) -> Estimate:
    """What the intervals are measured against: Student's, clustered by problem."""
    n, mean = len(values), fmean(values)
    half = T_OF[n] * sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half, n)


T_OF = {setting.problems: student(setting.problems - 1) for setting in (*NAMED, *HELD_OUT)}


def coverage(setting: Setting, evaluations: int, seed: str) -> dict[str, Any]:
    rng = random.Random(f"{seed} {setting.name}")
    truth = fmean(setting.law(rng) for _ in range(TRUTH_DRAWS))
    held = held_t = below = above = 0
    width = 0.0
    for _ in range(evaluations):
        values = means(setting, rng)
        found, student_s = mean_over_problems(values), plain_t(values)
        below += truth < found.low
        above += truth > found.high
        held += found.low <= truth <= found.high
        held_t += student_s.low <= truth <= student_s.high
        width += found.high - found.low
    return {
        "setting": setting.name,
        "problems": setting.problems,
        "attempts": setting.attempts,
        "truth": round(truth, 4),
        "coverage": round(held / evaluations, 4),
        "too_high": round(below / evaluations, 4),
        "too_low": round(above / evaluations, 4),
        "width": round(width / evaluations, 4),
        "coverage_of_t": round(held_t / evaluations, 4),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Two subjects: the first by a law, the second by what becomes of each chance."""

    name: str
    law: Law
    second: Callable[[float, random.Random], float]
    problems: int
    attempts: int


def same(chance: float, rng: random.Random) -> float:
    return chance


def easier(chance: float, rng: random.Random, by: float) -> float:
    """All problems by as much, in log odds."""
    bounded = min(max(chance, 1e-9), 1 - 1e-9)
    return 1 / (1 + exp(-log(bounded / (1 - bounded)) - by))


def other(chance: float, rng: random.Random, law: Law) -> float:
    """A subject as good, with strengths elsewhere on one problem in five."""
    return law(rng) if rng.random() < 0.2 else chance


MID, HARD = partial(beta, a=2.0, b=2.0), partial(beta, a=0.2, b=1.8)
CHANGES = [
    Change(name="the same subject, mid", law=MID, second=same, problems=30, attempts=16),
    Change(name="the same subject, hard", law=HARD, second=same, problems=100, attempts=4),
    Change(name="the same subject, 90% mastered", law=mastered, second=same, problems=500, attempts=4),
    Change(name="the same subject, one attempt", law=MID, second=same, problems=500, attempts=1),
    Change(name="as good, strong elsewhere", law=MID, second=partial(other, law=MID), problems=100, attempts=8),
    Change(name="as good, strong elsewhere, hard", law=HARD, second=partial(other, law=HARD), problems=30, attempts=16),
    Change(name="better, mid", law=MID, second=partial(easier, by=0.35), problems=30, attempts=16),
    Change(name="better, hard", law=HARD, second=partial(easier, by=0.8), problems=100, attempts=8),
    Change(name="better, one attempt", law=MID, second=partial(easier, by=0.4), problems=500, attempts=1),
]


def paired(change: Change, evaluations: int, seed: str) -> dict[str, Any]:
    rng = random.Random(f"{seed} {change.name}")
    pairs = [(p := change.law(rng), change.second(p, rng)) for _ in range(TRUTH_DRAWS // 4)]
    truth = fmean(b - a for a, b in pairs) if change.name.startswith("better") else 0.0
    spread = Spread(
        between=fmean((b - a - truth) ** 2 for a, b in pairs),
        attempts=fmean(a * (1 - a) + b * (1 - b) for a, b in pairs),
    )
    held = seen = seen_by_sign = seen_by_interval = 0
    for _ in range(evaluations):
        found = compare_paired(*zip_right(change, rng))
        held += found.difference.low <= truth <= found.difference.high
        seen += found.p_value <= LEVEL
        seen_by_sign += found.sign_p_value <= LEVEL
        seen_by_interval += not found.difference.low <= 0.0 <= found.difference.high
    promised = power_of(spread, truth, change.problems, change.attempts) if truth > 0 else LEVEL
    return {
        "change": change.name,
        "problems": change.problems,
        "attempts": change.attempts,
        "difference": round(truth, 4),
        "coverage": round(held / evaluations, 4),
        "seen": round(seen / evaluations, 4),
        "seen_by_interval": round(seen_by_interval / evaluations, 4),
        "seen_by_sign_test": round(seen_by_sign / evaluations, 4),
        "stated": round(promised, 4),
        "problems_needed_for_80%": problems_needed(spread, truth, change.attempts) if truth > 0 else None,
    }


def zip_right(change: Change, rng: random.Random) -> tuple[dict[str, list[bool]], dict[str, list[bool]]]:
    first, second = {}, {}
    for number in range(change.problems):
        chance = change.law(rng)
        then = change.second(chance, rng)
        first[str(number)] = [rng.random() < chance for _ in range(change.attempts)]
        second[str(number)] = [rng.random() < then for _ in range(change.attempts)]
    return first, second


def rows_of(kind: str, evaluations: int, seed: str) -> Iterator[dict[str, Any]]:
    if kind == "paired":
        yield from (paired(change, evaluations, seed) for change in CHANGES)
    else:
        settings = NAMED if kind == "named" else HELD_OUT
        yield from (coverage(setting, evaluations, seed) for setting in settings)


def show(title: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    print(f"\n{title}")
    kept = []
    for row in rows:
        if not kept:
            print("".join(f"{key:>19}" if number else f"{key:42}" for number, key in enumerate(row)))
        print(
            "".join(f"{value!s:>19}" if number else f"{value:42}" for number, value in enumerate(row.values())),
            flush=True,
        )
        kept.append(row)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=2000, help="simulated, for each setting")
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    many, seed = given.evaluations, given.seed
    print(f"{many} simulated evaluations each; standard error of a coverage of 95%: {sqrt(0.95 * 0.05 / many):.4f}")
    named = show("Intervals, six named settings", rows_of("named", many, seed))
    held_out = show("Intervals, settings held out", rows_of("held out", many, seed))
    changes = show("Two subjects on the same problems", rows_of("paired", many, seed))
    worst = min(row["coverage"] for row in (*named, *held_out))
    result = {"benchmark": "interval_coverage", "evaluations": many, "seed": seed, "worst_coverage": worst}
    print(json.dumps({**result, "named": named, "held_out": held_out, "paired": changes}))


if __name__ == "__main__":
    main()
