"""Compares two saved evaluations of the same problems, paired by problem: which is better, how certain that is, and how
much more data would show it. Evaluations with different setups are refused. The problem is the unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, comb, gcd, lcm, sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from rocstar.config.tree import flat
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.intervals import TAIL, Estimate, Z, figure, mean_difference, student
from rocstar.evaluation.metrics import avg_at_k
from rocstar.record.evaluations import GREEDY, RESULT, SAMPLES
from rocstar.record.folder import read_json
from rocstar.record.rollouts import attempt_rows
from rocstar.types import Verdict

SUBJECT = ("model", "step", "holds", "engine", "versions", "git", "seed", "greedy", "sandbox.slots",
           "sandbox.min_isolation")  # fmt: skip
"""Fields of `setup` about the subject, place, time and other measurements. All others must agree."""
OF_DATA = ("data.problems", "data.problems_sha256")
"""The fields of `setup.data` that must agree: the same problems may be in another file."""
ABSENT = object()
EXACT = 700  # numbers: 0.5 s at 16 attempts each; the time grows with the cube
POWER = 0.8  # chance of detecting a true difference; the usual choice

Right = Mapping[str, Sequence[bool]]
"""Problem id -> whether each judged attempt was right; problems without judged attempts are omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An evaluation read from its folder."""

    name: str
    """The name for the user."""
    setup: Mapping[str, Any]
    right: Right
    questions: Mapping[str, str]
    """Problem id -> the question."""
    undecided: float
    """Share of judged attempts that the verifier left undecided; they count as not right."""


def read_kept(folder: Path, name: str | None = None, *, greedy: bool = False) -> Kept:
    """name: for the user, by default the folder. greedy: its greedy attempts instead of the sampled ones. Raises
    DataError for a folder without its attempts."""
    if greedy and not (folder / GREEDY).is_file():
        raise DataError(f"{name or folder} kept no greedy attempts; compare without --greedy, or evaluate with them")
    setup = read_json(folder / RESULT).get("setup", {})
    right: dict[str, list[bool]] = defaultdict(list)
    questions: dict[str, str] = {}
    undecided = 0
    for row in attempt_rows(folder / (GREEDY if greedy else SAMPLES), ("problem_id", "question", "verdict")):
        problem, verdict = row["problem_id"], row["verdict"]
        questions[problem] = row["question"]
        if verdict is not None:  # a service failure has none
            right[problem].append(verdict == Verdict.RIGHT)
            undecided += verdict == Verdict.UNDECIDED
    share = undecided / max(1, sum(map(len, right.values())))
    return Kept(name=name or str(folder), setup=setup, right=dict(right), questions=questions, undecided=share)


def refuse_different(a: Kept, b: Kept, allowed: Sequence[str]) -> None:
    """Raises ConfigError that names all fields in which the evaluations differ, except those in `allowed`."""
    known = {field for kept in (a, b) for field, _ in flat(kept.setup)}
    for name in allowed:
        if not any(_is_within(field, name) for field in known):
            raise ConfigError(
                f"--allow {name}: the evaluations have no such field; they have {', '.join(sorted(known))}"
            )
    if found := differences((a.name, a.setup), (b.name, b.setup), allowed):
        allow = " ".join(f"--allow {field}" for field in found)
        raise ConfigError(
            f"the evaluations differ {'; '.join(found.values())}; "
            f"evaluate both alike, or add {allow} if that is what you compare"
        )


Setup = tuple[str, Mapping[str, Any]]
"""(name of an evaluation, its setup)."""


def differences(a: Setup, b: Setup, allowed: Sequence[str] = ()) -> dict[str, str]:
    """Field -> a description of the difference; without fields that may always differ, and `allowed`."""
    mine, theirs = dict(flat(a[1])), dict(flat(b[1]))
    found = {}
    for field in sorted({*mine, *theirs}):
        unread = _is_within(field, "data") and field not in OF_DATA
        unknown = _is_within(field, "code") and not ("code" in a[1] and "code" in b[1])  # older ones did not record it
        skipped = unread or unknown or any(_is_within(field, part) for part in (*SUBJECT, *allowed))
        one, other = mine.get(field, ABSENT), theirs.get(field, ABSENT)
        if not skipped and one != other:
            found[field] = f"in {field}: {_said(one)} in {a[0]}, {_said(other)} in {b[0]}"
    return found


def compared(a: Kept, b: Kept) -> dict[str, Any]:
    """B against A. Raises DataError if they judged no problem in common."""
    shared = a.right.keys() & b.right.keys()
    if not shared:
        raise DataError(f"{a.name} and {b.name} judged no problem in common, so there is nothing to pair")
    found = asdict(compare_paired(a.right, b.right))
    return {
        "a": _subject(a),
        "b": _subject(b),
        "problems": len(shared),
        "only_a": len(a.right.keys() - shared),
        "only_b": len(b.right.keys() - shared),
        **found,
        "difference": figure(Estimate(**found["difference"])),
        "table": _table(a, b, sorted(shared)),
    }


def planned(a: Kept, b: Kept | None, difference: float, power: float = POWER) -> dict[str, Any]:
    """The problems or attempts needed to detect a given difference with chance `power` at a level of 5%, by the spread
    of two evaluations, or of one and a second like it. Raises ConfigError for a difference outside 0 to 1 or a power
    outside 0.05 to 1."""
    if not 0 < difference <= 1 or not 0.05 < power < 1:
        raise ConfigError(
            f"--detect must lie above 0 and up to 1 and --power between 0.05 and 1, got {difference:g} and {power:g}"
        )
    right = [kept.right for kept in (a, b) if kept is not None]
    problems = len(right[0].keys() & right[-1].keys())
    if not problems:
        raise DataError(f"{a.name} judged no problem" + (f" that {b.name} judged too" if b else ""))
    spread = spread_of(*right) if b else spread_of_one(a.right)
    attempts = min(len(some) for each in right for some in each.values())
    return {
        "difference": difference,
        "wanted_power": power,
        "problems": problems,
        "attempts": attempts,
        "power": power_of(spread, difference, problems, attempts),
        "problems_needed": problems_needed(spread, difference, attempts, power),
        "attempts_needed": attempts_needed(spread, difference, problems, power),
        "spread": asdict(spread),
        "assumed": _assumption(b, attempts, spread),
    }


def _assumption(b: Kept | None, attempts: int, spread: Spread) -> str:
    if b is None:
        return "the second gains as much on every problem; one that gains on few needs more"
    if attempts == 1 or not spread.between:
        return "all that problems differ by is chance of attempts; one attempt each can't tell it from real change"
    return "the spread that these two show"


def _is_within(field: str, name: str) -> bool:
    return field == name or field.startswith(f"{name}.")


def _said(value: Any) -> str:
    text = "nothing" if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _subject(kept: Kept) -> dict[str, Any]:
    accuracy = avg_at_k(list(kept.right.values()))
    attempts = {len(some) for some in kept.right.values()}
    return {
        "evaluation": kept.name,
        "model": kept.setup.get("model"),
        "step": kept.setup.get("step"),
        "accuracy": figure(accuracy, undecided=kept.undecided),
        "attempts": max(attempts, default=0),
    }


def _table(a: Kept, b: Kept, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each problem, the largest gain first."""
    shares = {name: [sum(kept.right[name]) / len(kept.right[name]) for kept in (a, b)] for name in names}
    rows = [
        {"problem_id": name, "question": a.questions[name], "a": first, "b": second, "difference": second - first}
        for name, (first, second) in shares.items()
    ]
    return sorted(rows, key=lambda row: (-row["difference"], row["problem_id"]))


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
        observed = max(0, abs(sum(steps)) - gcd(*sizes))  # less half the gap of sums: continuity
        return 2 * NormalDist().cdf(-observed / sqrt(sum(size * size for size in sizes)))
    width = len(sizes) // 8 + 1  # a coefficient is at most 2^n
    counts = 1
    for size in sizes:
        counts += counts << (2 * size * 8 * width)  # power 2 * size: this one up; power 0: down
    total, observed = sum(sizes), abs(sum(steps))
    packed = counts.to_bytes((2 * total + 1) * width, "little")
    above = packed[(total + observed) * width :]  # sums from `seen` up to `total`
    extreme = sum(int.from_bytes(above[i : i + width], "little") for i in range(0, len(above), width))
    return min(1.0, extreme / 2.0 ** (len(sizes) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The variance of one problem's difference, in two parts, no unit."""

    between: float
    """Variance of the true differences from problem to problem."""
    attempts: float
    """Variance of one attempt at a problem, both subjects together. Divided by the number of attempts it is the
    variance of a share."""

    def variance(self, attempts: int) -> float:
        """Variance of one problem's difference with so many attempts by each subject."""
        return self.between + self.attempts / attempts


def spread_of(a: Right, b: Right) -> Spread:
    """The spread of two evaluations. With one attempt each the two parts cannot be separated; then all of it counts as
    the variance of attempts, which overstates the value of more attempts. They must share a problem."""
    names = a.keys() & b.keys()
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
    """Without a second evaluation: assumes a subject like this one, better by the same amount on every problem. A
    change that helps only some problems needs more. There must be a problem."""
    if all(len(attempts) == 1 for attempts in a.values()):
        share = fmean(attempts[0] for attempts in a.values())
        return Spread(between=0.0, attempts=2 * share * (1 - share))
    several = [attempts for attempts in a.values() if len(attempts) > 1]
    return Spread(between=0.0, attempts=2 * fmean(map(_of_one_attempt, several)))


def problems_needed(spread: Spread, difference: float, attempts: int, power: float = POWER) -> int:
    """Number of problems that show a mean difference of this size with chance `power`, at a level of 5%. Raises
    ValueError for a difference that is not above 0, or a power outside 0.05 to 1."""
    problems = max(2, ceil(spread.variance(attempts) * _reach(difference, power, Z) ** 2))
    while power_of(spread, difference, problems, attempts) < power:
        problems += 1  # few more: Student's point is larger than the normal one
    return problems


def attempts_needed(spread: Spread, difference: float, problems: int, power: float = POWER) -> int | None:
    """Number of attempts at each problem, by each subject, that do the same; None if no number does, because problems
    differ too much. Raises ValueError as `problems_needed`."""
    left = problems / _reach(difference, power, student(problems)) ** 2 - spread.between
    return max(1, ceil(spread.attempts / left)) if left > 0 else None


def power_of(spread: Spread, difference: float, problems: int, attempts: int) -> float:
    """Chance of detecting a mean difference of this size, above 0, at a level of 5%."""
    error = sqrt(spread.variance(attempts) / problems)
    if error == 0.0:
        return 1.0
    normal, far = NormalDist(), student(problems)
    return normal.cdf(difference / error - far) + normal.cdf(-difference / error - far)


def _reach(difference: float, power: float, far: float) -> float:
    """Standard errors between no difference and a detected one, per unit of difference; far: those that detect one."""
    if difference <= 0 or not 2 * TAIL < power < 1:
        raise ValueError(f"needs a difference above 0 and a power between 0.05 and 1, got {difference} and {power}")
    return (far + NormalDist().inv_cdf(power)) / difference


def _of_one_attempt(right: Sequence[bool]) -> float:
    """Unbiased variance of one attempt's 0 or 1; 0 for a single attempt."""
    n, c = len(right), sum(right)
    return c * (n - c) / comb(n, 2) / 2 if n > 1 else 0.0
