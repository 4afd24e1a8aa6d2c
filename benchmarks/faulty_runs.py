"""Does each warning of an RL stage come in a run that has its fault?

    python benchmarks/faulty_runs.py [--only NAME ...] [--out FOLDER]

Each run is the tiny one of the tests (25,000 parameters, real sandbox, engine and learner) with one thing wrong: what
it was shown in its cold start, a limit, or a setting of the learner. Prints the run, the warning that it should give,
the RL step at which it came, and what else it warned of; ends with 1 where one did not come. The run `healthy`, in
which nothing is wrong, must give none. Of the quickstart `rocstar runs show RUN --json` says the same (`warnings`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frame import ROOT, Table, parser, read_rows

sys.path.insert(0, str(ROOT))

from tests.tiny_run import Command, call, final, tool, user, workplace, write_rows

STEPS = 10  # of RL
BASE: Mapping[str, object] = {
    "stage.cold.steps": 300,
    "stage.stage1.steps": STEPS,
    "stage.stage3.steps": 0,
    "rollout.problems_per_step": 4,
    "rollout.attempts_per_problem": 8,
    "rollout.max_response_tokens": 96,
    "learning.learning_rate": 1e-4,
}
"""Beside the tests' recipe: a cold start that is learnt well, and steps of 32 attempts."""
NUMBERS = range(2, 8)
Messages = list[dict[str, Any]]


class Case(NamedTuple):
    """One run."""

    warning: str | None
    """That must come; None where none may."""
    shown: Callable[[int], list[Messages]]
    """What the cold start shows for a number: each attempt will be like one of these."""
    settings: Mapping[str, object] = {}
    answers: Callable[[int], int] = lambda a: a + 3
    """Reference answers of held-out problems."""


def works(a: int, code: str | None = None) -> Messages:
    return [user(a), call(code or f"print({a}+3)"), tool(a + 3), final(a + 3)]


def fails_first(a: int) -> Messages:
    return [user(a), call(f"print({a}+3"), tool("SyntaxError"), *works(a)[1:]]


def guesses(a: int, number: int) -> Messages:
    return [user(a), final(number)]


def boxes(a: int) -> Messages:
    both = f"It is \\boxed{{{a}}}. <answer>\\boxed{{{a + 3}}}</answer>"
    return [user(a), call(f"print({a}+3)"), tool(a + 3), {"role": "assistant", "content": both}]


def mixed(a: int) -> list[Messages]:
    return [works(a), fails_first(a), guesses(a, a)]


CASES = {
    "healthy": Case(None, mixed),
    "too short": Case("truncation", mixed, {"rollout.max_response_tokens": 12}),
    "never shown the tool": Case("no tool", lambda a: [guesses(a, a + 3), guesses(a, a)]),
    "problems too easy": Case("too easy", lambda a: [works(a)]),
    "nothing but wrong": Case("nothing learnt", lambda a: [guesses(a, a)]),
    "prints what it knows": Case("constant printing", lambda a: [works(a, f"print({a + 3})"), guesses(a, a)]),
    "knows without reasons": Case("unfounded answers", lambda a: [guesses(a, a + 3), guesses(a, a)]),
    "two answers": Case("several answers", lambda a: [boxes(a), guesses(a, a)]),
    "learns too fast": Case("reward collapse", mixed, {"learning.learning_rate": 0.05}),
    "paid for entropy": Case(
        "entropy growth", mixed, {"learning.entropy_coefficient": 1.0, "learning.learning_rate": 4e-3}
    ),
    "held-out answers unlike": Case(
        "evaluation is flat",
        mixed,
        {"evaluate.every_steps": 2, "learning.learning_rate": 2e-3},
        answers=lambda a: 1000 + a,
    ),
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    base = arguments.out or Path(tempfile.mkdtemp(prefix="faulty-"))
    base.mkdir(parents=True, exist_ok=True)
    table = Table("run", "warning", "came at", "also", first=26, width=22)
    good = [_judged(name, CASES[name], base, table) for name in arguments.only]
    return 0 if all(good) else 1


def _judged(name: str, case: Case, base: Path, table: Table) -> bool:
    told = _warnings(case, base / name.replace(" ", "-"))
    steps = {warning["name"]: warning["step"] - BASE["stage.cold.steps"] for warning in reversed(told)}
    also = ", ".join(sorted(set(steps) - {case.warning}))
    came = steps.get(case.warning) if case.warning else None
    table.row(name, case.warning, came, also)
    return bool(told) == bool(case.warning) and (case.warning is None or came is not None)


def _warnings(case: Case, folder: Path) -> Sequence[Mapping[str, Any]]:
    workplace(folder)
    write_rows(folder / "rows.jsonl", [{"messages": m} for a in NUMBERS for m in case.shown(a)])
    held_out = [{"question": f"Add {a} and 3", "answer": str(case.answers(a))} for a in range(6, 8)]
    write_rows(folder / "test.jsonl", held_out)
    settings = {**BASE, **case.settings}
    ended = Command.start(folder, "train", "tiny.toml", *(f"{key}={value}" for key, value in settings.items())).wait()
    if ended.code:
        raise SystemExit(f"{folder}: the run ended with {ended.code}: {ended.told}")
    events = read_rows(folder / "runs" / "tiny" / "events.jsonl")
    return [event for event in events if event["event"] == "warning"]


if __name__ == "__main__":
    sys.exit(main())
