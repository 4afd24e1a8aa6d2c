"""Compares two saved evaluations of the same problems, paired by problem: which is better, and how certain that
is. Evaluations with different setups are refused. The problem is the unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rocstar.config.tree import flat
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.intervals import figure, mean_difference
from rocstar.evaluation.metrics import avg_at_k, means_of_parts
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
    parts: Mapping[str, float | None]
    """`reward/parts/NAME` -> its mean."""


def read_kept(folder: Path, name: str | None = None, *, greedy: bool = False) -> Kept:
    """name: for the user, by default the folder. greedy: its greedy attempts instead of the sampled ones. Raises
    DataError for a folder without its attempts."""
    if greedy and not (folder / GREEDY).is_file():
        raise DataError(f"{name or folder} kept no greedy attempts; compare without --greedy, or evaluate with them")
    setup = read_json(folder / RESULT).get("setup", {})
    right: dict[str, list[bool]] = defaultdict(list)
    questions: dict[str, str] = {}
    parts: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    undecided = 0
    columns = ("problem_id", "question", "verdict", "reward_parts")
    for row in attempt_rows(folder / (GREEDY if greedy else SAMPLES), columns):
        problem, verdict = row["problem_id"], row["verdict"]
        questions[problem] = row["question"]
        parts[problem].append(row["reward_parts"] or {})
        if verdict is not None:  # a service failure has none
            right[problem].append(verdict == Verdict.RIGHT)
            undecided += verdict == Verdict.UNDECIDED
    share = undecided / max(1, sum(map(len, right.values())))
    return Kept(
        name=name or str(folder),
        setup=setup,
        right=dict(right),
        questions=questions,
        undecided=share,
        parts=means_of_parts(list(parts.values())),
    )


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
            f"evaluate both alike, or add {allow} to rocstar compare if that is what you compare"
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
    return {
        "a": _subject(a),
        "b": _subject(b),
        "problems": len(shared),
        "only_a": len(a.right.keys() - shared),
        "only_b": len(b.right.keys() - shared),
        **compare_paired(a.right, b.right),
        "table": _table(a, b, sorted(shared)),
    }


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
        **kept.parts,
    }


def _table(a: Kept, b: Kept, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each problem, the largest gain first."""
    shares = {name: [sum(kept.right[name]) / len(kept.right[name]) for kept in (a, b)] for name in names}
    rows = [
        {"problem_id": name, "question": a.questions[name], "a": first, "b": second, "difference": second - first}
        for name, (first, second) in shares.items()
    ]
    return sorted(rows, key=lambda row: (-row["difference"], row["problem_id"]))


def compare_paired(a: Right, b: Right) -> dict[str, Any]:
    """B against A on the problems that both judged. Raises ValueError where they share no problem.

    `difference`: mean over problems of B's share of right attempts minus A's. `p_value`: chance of a mean difference at
    least as large, either way, if each problem's two results were exchanged by a fair coin: the exact sign-flip test;
    with one attempt each it is McNemar's exact test. `better`, `worse`, `same`: problems where B's share is larger,
    smaller, equal. `sign_p_value`: chance of a count of better against worse at least as uneven, either way, with equal
    chances: the sign test."""
    pairs = [(a[name], b[name]) for name in sorted(a.keys() & b.keys())]
    scale = lcm(*{len(attempts) for pair in pairs for attempts in pair})
    steps = [sum(after) * (scale // len(after)) - sum(before) * (scale // len(before)) for before, after in pairs]
    better, worse = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    return {
        "difference": figure(mean_difference([step / scale for step in steps])),
        "p_value": flip_test(steps),
        "better": better,
        "worse": worse,
        "same": len(steps) - better - worse,
        "sign_p_value": flip_test([1] * better + [-1] * worse),
    }


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
