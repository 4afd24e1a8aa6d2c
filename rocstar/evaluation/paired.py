"""Two subjects on the same problems: is one better, how sure is that, and how much more would it take to see it.

Pure and standard library only. The problem is the unit, and each stands against itself.

Not here: which evaluations may be compared, and reading them (compare.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, comb, gcd, lcm, sqrt
from statistics import NormalDist, fmean

from rocstar.evaluation.intervals import TAIL, Estimate, Z, mean_difference, student

EXACT = 700  # numbers: 0.5 s at 16 attempts each; the time grows with the cube
POWER = 0.8  # chance of seeing a difference that is there; the usual choice

Right = Mapping[str, Sequence[bool]]
"""Problem id -> whether each judged attempt was right; at least one attempt each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """B against A on the problems that both judged."""

    difference: Estimate
    """Mean over problems of B's share of right attempts minus A's."""
    p_value: float
    """Chance of a mean difference at least as large, either way, if each problem's two results were exchanged by a fair
    coin: the exact sign-flip test. With one attempt each it is McNemar's exact test."""
    better: int
    """Problems where B's share is larger."""
    worse: int
    """Problems where it is smaller."""
    same: int
    """Problems where the shares are equal."""
    sign_p_value: float
    """Chance of a count of better against worse at least as uneven, either way, with equal chances: the sign test."""


def compare_paired(a: Right, b: Right) -> Paired:
    """B against A. Raises ValueError where they share no problem."""
    pairs = [(a[name], b[name]) for name in sorted(a.keys() & b.keys())]
    if not pairs:
        raise ValueError("the two share no problem")
    scale = lcm(*{len(attempts) for pair in pairs for attempts in pair})
    steps = [sum(after) * (scale // len(after)) - sum(before) * (scale // len(before)) for before, after in pairs]
    better, worse = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    return Paired(
        difference=mean_difference([step / scale for step in steps]),
        p_value=flip_test(steps),
        better=better,
        worse=worse,
        same=len(steps) - better - worse,
        sign_p_value=flip_test([1] * better + [-1] * worse),
    )


def flip_test(steps: Sequence[int]) -> float:
    """Two-sided test that the signs of these whole numbers are fair coins, on their sum; 1 where all are 0. Exact up to
    EXACT numbers that are not 0; beyond them by the normal law, which is then as good.

    All 2^n sums are counted at once: a polynomial whose powers are the sums, held as one integer with `width` bytes for
    each coefficient."""
    sizes = [abs(step) for step in steps if step]
    if not sizes:
        return 1.0
    if len(sizes) > EXACT:
        seen = max(0, abs(sum(steps)) - gcd(*sizes))  # sums lie twice the divisor apart: half of that is continuity
        return 2 * NormalDist().cdf(-seen / sqrt(sum(size * size for size in sizes)))
    width = len(sizes) // 8 + 1  # a coefficient is at most 2^n
    counts = 1
    for size in sizes:
        counts += counts << (2 * size * 8 * width)  # power 2 * size: this one up; power 0: down
    total, seen = sum(sizes), abs(sum(steps))
    held = counts.to_bytes((2 * total + 1) * width, "little")
    above = held[(total + seen) * width :]  # sums from `seen` up to `total`
    extreme = sum(int.from_bytes(above[i : i + width], "little") for i in range(0, len(above), width))
    return min(1.0, extreme / 2.0 ** (len(sizes) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Why the difference of one problem varies: two variances, no unit."""

    between: float
    """Variance of the true differences from problem to problem."""
    attempts: float
    """Variance of one attempt at a problem, both subjects together. Divided by the number of attempts it is the
    variance of a share."""

    def variance(self, attempts: int) -> float:
        """Variance of one problem's difference with so many attempts by each subject."""
        return self.between + self.attempts / attempts


def spread_of(a: Right, b: Right) -> Spread:
    """The spread that two evaluations show. With one attempt each the two parts cannot be told apart; then all of it
    counts as the variance of attempts, which makes more attempts look too helpful. Raises ValueError where they share
    no problem."""
    names = a.keys() & b.keys()
    if not names:
        raise ValueError("the two share no problem")
    differences = [fmean(b[name]) - fmean(a[name]) for name in names]
    mean = fmean(differences)
    total = sum((d - mean) ** 2 for d in differences) / max(1, len(differences) - 1)
    inside = [_of_one_attempt(a[name]) + _of_one_attempt(b[name]) for name in names]
    most = min(min(len(a[name]), len(b[name])) for name in names)
    if most == 1:
        return Spread(between=0.0, attempts=total)
    shown = fmean(_of_one_attempt(x) / len(x) + _of_one_attempt(y) / len(y) for x, y in ((a[n], b[n]) for n in names))
    return Spread(between=max(0.0, total - shown), attempts=fmean(inside))


def spread_of_one(a: Right) -> Spread:
    """Before there is a second evaluation: a subject like this one, better by as much on every problem. A change that
    helps some problems and not others needs more than this says. Raises ValueError without problems."""
    if not a:
        raise ValueError("there is no problem")
    if all(len(attempts) == 1 for attempts in a.values()):
        share = fmean(attempts[0] for attempts in a.values())
        return Spread(between=0.0, attempts=2 * share * (1 - share))
    several = [attempts for attempts in a.values() if len(attempts) > 1]
    return Spread(between=0.0, attempts=2 * fmean(map(_of_one_attempt, several)))


def problems_needed(spread: Spread, difference: float, attempts: int, power: float = POWER) -> int:
    """Problems with which a mean difference of so much is seen with chance `power`, at a level of 5%. Raises ValueError
    for a difference that is not above 0, or a power outside 0.05 to 1."""
    problems = max(2, ceil(spread.variance(attempts) * _reach(difference, power, Z) ** 2))
    while power_of(spread, difference, problems, attempts) < power:
        problems += 1  # few more: Student's point is larger than the normal one
    return problems


def attempts_needed(spread: Spread, difference: float, problems: int, power: float = POWER) -> int | None:
    """Attempts at each problem, by each subject, that do the same; None where no number of them does, because problems
    differ too much. Raises ValueError as `problems_needed`."""
    left = problems / _reach(difference, power, student(problems)) ** 2 - spread.between
    return max(1, ceil(spread.attempts / left)) if left > 0 else None


def power_of(spread: Spread, difference: float, problems: int, attempts: int) -> float:
    """Chance of seeing a mean difference of so much at a level of 5%. Raises ValueError unless it is above 0."""
    if difference <= 0:
        raise ValueError(f"a difference to be seen must be above 0, got {difference}")
    error = sqrt(spread.variance(attempts) / problems)
    if error == 0.0:
        return 1.0
    normal, far = NormalDist(), student(problems)
    return normal.cdf(difference / error - far) + normal.cdf(-difference / error - far)


def _reach(difference: float, power: float, far: float) -> float:
    """Standard errors between no difference and a seen one, per unit of difference; far: those at which one is seen."""
    if difference <= 0 or not 2 * TAIL < power < 1:
        raise ValueError(f"needs a difference above 0 and a power between 0.05 and 1, got {difference} and {power}")
    return (far + NormalDist().inv_cdf(power)) / difference


def _of_one_attempt(right: Sequence[bool]) -> float:
    """Unbiased variance of one attempt's 0 or 1; 0 for a single attempt, which shows none."""
    n, c = len(right), sum(right)
    return c * (n - c) / comb(n, 2) / 2 if n > 1 else 0.0
