"""Two kept evaluations against each other: refused unless they asked the same, then paired problem by problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocstar.config.tree import flat
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.intervals import Estimate, figure
from rocstar.evaluation.metrics import avg_at_k
from rocstar.evaluation.paired import (
    POWER,
    Spread,
    attempts_needed,
    compare_paired,
    power_of,
    problems_needed,
    spread_of,
    spread_of_one,
)
from rocstar.record.evaluations import RESULT, SAMPLES
from rocstar.record.folder import read_json
from rocstar.record.rollouts import attempt_rows
from rocstar.types import Verdict

SUBJECT = ("model", "step", "engine", "versions", "git", "seed", "greedy", "sandbox.slots", "sandbox.min_isolation")
"""Fields of `setup` that say who was evaluated, where, when and what else was measured. All others must agree."""
OF_DATA = ("data.problems", "data.problems_sha256")
"""The fields of `setup.data` that must agree: the same problems may lie in another file."""
ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An evaluation as its folder has it."""

    name: str
    """As it is shown."""
    setup: Mapping[str, Any]
    right: Mapping[str, Sequence[bool]]
    """Problem id -> whether each judged attempt was right; problems without one are left out."""
    questions: Mapping[str, str]
    """Problem id -> the question."""
    undecided: float
    """Share of those attempts that the verifier left open; they count as not right."""


def read_kept(folder: Path, name: str | None = None) -> Kept:
    """name: as it is shown, else the folder. Raises DataError for a folder that lacks its attempts."""
    setup = read_json(folder / RESULT).get("setup", {})
    right: dict[str, list[bool]] = defaultdict(list)
    questions: dict[str, str] = {}
    undecided = 0
    for row in attempt_rows(folder / SAMPLES, ("problem_id", "question", "verdict")):
        problem, verdict = row["problem_id"], row["verdict"]
        questions[problem] = row["question"]
        if verdict is not None:  # a fault of ours has none
            right[problem].append(verdict == Verdict.RIGHT)
            undecided += verdict == Verdict.UNDECIDED
    share = undecided / max(1, sum(map(len, right.values())))
    return Kept(name=name or str(folder), setup=setup, right=dict(right), questions=questions, undecided=share)


def refuse_different(a: Kept, b: Kept, allowed: Sequence[str]) -> None:
    """Raises ConfigError that names the first field in which the evaluations differ, unless it is in `allowed`."""
    mine, theirs = dict(flat(a.setup)), dict(flat(b.setup))
    known = {*mine, *theirs}
    for name in allowed:
        if not any(_is_within(field, name) for field in known):
            raise ConfigError(
                f"--allow {name}: the evaluations have no such field; they have {', '.join(sorted(known))}"
            )
    for field in sorted(known):
        skipped = _is_skipped(field) or any(_is_within(field, name) for name in allowed)
        one, other = mine.get(field, ABSENT), theirs.get(field, ABSENT)
        if not skipped and one != other:
            raise ConfigError(
                f"the evaluations differ in {field}: {_said(one)} in {a.name}, {_said(other)} in {b.name}; "
                f"evaluate both alike, or add --allow {field} where that is what you compare"
            )


def compared(a: Kept, b: Kept) -> dict[str, Any]:
    """B against A. Raises DataError where they judged no problem in common."""
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
    """What it would take to see a difference of so much with chance `power` at a level of 5%, by the spread that two
    evaluations show, or one and a second like it. Raises ConfigError for a difference outside 0 to 1 or a power
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


def _is_skipped(field: str) -> bool:
    if _is_within(field, "data"):
        return field not in OF_DATA
    return any(_is_within(field, name) for name in SUBJECT)


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
