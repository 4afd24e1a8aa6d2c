"""Means over problems with 95% intervals: a figure of one subject, and the difference between two.

Pure and standard library only. The problem is the unit: attempts at one problem are not independent, so more attempts
narrow an interval only down to the variation between problems. docs/results.md reports the coverage of the intervals.

Not here: which number each problem gives (metrics.py), tests between two subjects (compare.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, lgamma, log, log1p, sqrt
from statistics import fmean, stdev
from typing import Any

Z = 1.959964  # 97.5% point of the normal law: two-sided 95%
TAIL = 0.025  # outside a 95% interval, on each side
BISECTIONS = 40  # halvings of 0 to 1: to 1e-12
TERMS = 40  # of the fraction, plus three times sqrt(a + b); more change no digit


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its 95% interval. With n = 0 the value is 0, the interval 0 to 1."""

    value: float
    """The mean; for shares 0 to 1."""
    low: float
    high: float
    n: int
    """Number of problems."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def figure(estimate: Estimate, missing: int = 0, undecided: float = 0.0) -> dict[str, Any]:
    """An estimate in the form that run folders and tables use. missing: attempts excluded because a service failure
    ended them. undecided: share of the included attempts that count as not right because the verifier left them
    undecided. Both are omitted if 0."""
    shown = {"value": estimate.value, "interval": [estimate.low, estimate.high], "n": estimate.n}
    notes = {"missing": missing, "undecided": undecided}
    return shown | {name: value for name, value in notes.items() if value}


def wilson(successes: float, n: float) -> Estimate:
    """A share of n independent problems with Wilson's score interval, which is never empty, also at 0 and 1; n may be
    an effective size. Raises ValueError unless 0 <= successes <= n."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n, got {successes} of {n}")
    if n == 0:
        return Estimate(0.0, 0.0, 1.0, 0)
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)), int(n))


def mean_over_problems(values_P: Sequence[float]) -> Estimate:
    """Mean of one number from 0 to 1 for each problem.

    If every number is 0 or 1 (one attempt each, for example), or all are equal, the interval is Wilson's. Otherwise it
    is Jeffreys' of a Beta law with the mean and the clustered variance of the problems and of one more, half of it 0
    and half of it 1: a small test may contain only easy problems though one in ten is hard, and then its own spread is
    too small. It is never narrower than Wilson's at the effective size (problems over the design effect). Ours; if 9 of
    10 problems are mastered, the coverage of t intervals falls to 85%."""
    n = len(values_P)
    if set(values_P) <= {0.0, 1.0} or len(set(values_P)) == 1:
        return wilson(min(float(n), sum(values_P)), n)
    value = fmean(values_P)
    low, high = _jeffreys(values_P)
    variance = sum((x - value) ** 2 for x in values_P) / (n - 1)
    size = n * max(1.0, value * (1 - value) / variance)  # problems over the design effect
    other = wilson(value * size, size)
    return Estimate(value, min(value, low, other.low), max(value, high, other.high), n)


def mean_difference(differences_P: Sequence[float]) -> Estimate:
    """Mean of one difference, -1 to 1, for each problem.

    Student's t interval over the problems and one more, half of it up and half of it down, of the typical size (root
    mean square of the differences that are not 0): if few problems differ, all may differ in one direction by chance.
    With one attempt each it is close to Bonett and Price's (2012) interval for paired shares. If none differs, it is
    Wilson's width at zero, so that "no change" among few problems does not look certain. Raises ValueError without
    differences."""
    n = len(differences_P)
    if not n:
        raise ValueError("a mean difference needs at least one problem")
    value = fmean(differences_P)
    squares = [d * d for d in differences_P if d]
    if not squares:
        half = Z * Z / (n + Z * Z)
    else:
        more = fmean(squares)
        shrunk = value * n / (n + 1)
        variance = (sum(squares) + more) / (n + 1) - shrunk * shrunk
        half = student(n) * sqrt(variance / n)
    return Estimate(value, max(-1.0, value - half), min(1.0, value + half), n)


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean of a few figures, such as one a seed, by Student's t law; None of fewer than two, or of
    equal ones."""
    if len(values) < 2 or not (spread := stdev(values)):
        return None
    half = student(len(values) - 1) * spread / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


@cache
def student(freedom: float) -> float:
    """97.5% point of Student's t law. Raises ValueError unless freedom > 0."""
    inside = beta_quantile(2 * TAIL, freedom / 2, 0.5)
    return sqrt(freedom * (1 - inside) / inside)


def beta_quantile(chance: float, a: float, b: float) -> float:
    """The x below which a Beta(a, b) law puts `chance`. Raises ValueError unless a, b > 0."""
    if not (a > 0 and b > 0):
        raise ValueError(f"a Beta law needs positive parameters, got {a} and {b}")
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _beta_below(middle, a, b) < chance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _jeffreys(values_P: Sequence[float]) -> tuple[float, float]:
    n = len(values_P)
    mean = (sum(values_P) + 0.5) / (n + 1)
    square = (sum(x * x for x in values_P) + 0.5) / (n + 1)
    size = mean * (1 - mean) * (n + 2) / (square - mean * mean) - 1  # of a Beta law: its a + b
    a, b = mean * size, (1 - mean) * size
    return beta_quantile(TAIL, a, b), beta_quantile(1 - TAIL, a, b)


def _beta_below(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Press et al., Numerical Recipes, 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _beta_below(1.0 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """From its last term to its first."""
    below = 1.0
    for m in range(TERMS + int(3 * sqrt(a + b)), 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        below = 1.0 + even / (1.0 + odd / below)
    return 1.0 / (1.0 - (a + b) * x / (a + 1) / below)
