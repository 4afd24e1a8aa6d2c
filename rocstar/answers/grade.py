"""Decide whether a final answer equals the reference: cheap graders first, then symbolic ones, in a configurable order.

Works on extracted answers; `extract.py` finds them, `verifier.py` computes rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rocstar.answers.caps import MAX_CHARS, refusal
from rocstar.answers.numbers import compare_numbers
from rocstar.answers.symbolic import Found, Question, SymbolicChecker
from rocstar.answers.text import compare_exactly, compare_text
from rocstar.answers.wording import clean
from rocstar.errors import ConfigError, VerifierUnavailable
from rocstar.types import Verdict

T = TypeVar("T")

AT_ONCE: dict[str, Callable[[str, str], Found | None]] = {
    "exact": compare_exactly, "numbers": compare_numbers, "text": compare_text
}  # fmt: skip
"""Graders that decide in microseconds, or not at all; their verdicts are final."""
SYMBOLIC = ("prime", "math_verify", "math_verify_any_names")
"""Graders in the worker processes. The first that accepts decides; all must reject (release: either may accept)."""
DEFAULT = ("numbers", "text", "prime", "math_verify")
"""Fused as the release fuses the last two, behind two exact ones; ("prime", "math_verify") is the release alone."""
BY_VERIFIER = {"boxed_text": ("exact",)}
"""Graders of verifiers that do not use the default, by `evaluate.verifier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    gold: str
    """Reference answer."""
    predicted: str | None
    """The extracted answer; None when there was none."""


@dataclass(frozen=True, slots=True)
class Grade:
    verdict: Verdict
    """RIGHT, WRONG or UNDECIDED."""
    method: str
    """The rule that decided: integer, number, residue, unit, not_a_number, text, choice, value, prime, math_verify,
    no_answer, too_long, too_deep, too_big, unreadable, deadline, memory, gold_unparsed, unsure."""
    extracted: str | None
    """The answer that was compared; None when there was none."""


class Grader:
    """Compares answers; owns the worker processes, which start at the first question that needs them."""

    def __init__(self, symbolic: SymbolicChecker | None = None, *, graders: Sequence[str] = DEFAULT) -> None:
        """`graders`: names, in order of use, those of AT_ONCE first. Raises ConfigError for an unknown name."""
        for name in graders:
            if name not in AT_ONCE and name not in SYMBOLIC:
                raise ConfigError(f"{name!r} is no grader; choose from {', '.join([*AT_ONCE, *SYMBOLIC])}.")
        self._at_once = [AT_ONCE[name] for name in graders if name in AT_ONCE]
        self._graders = tuple(name for name in graders if name in SYMBOLIC)
        self._symbolic = symbolic or SymbolicChecker()

    async def grade(self, gold: str, predicted: str | None) -> Grade:
        """One pair; see `grade_all`."""
        return (await self.grade_all([Pair(gold=gold, predicted=predicted)]))[0]

    async def grade_all(self, pairs: Sequence[Pair]) -> list[Grade]:
        """`grade_each`, for callers that need all grades. Raises VerifierUnavailable."""
        grades = []
        for grade in await self.grade_each(pairs):
            if isinstance(grade, VerifierUnavailable):
                raise grade
            grades.append(grade)
        return grades

    async def grade_each(self, pairs: Sequence[Pair]) -> list[Grade | VerifierUnavailable]:
        """Compare extracted answers with their references, in order; a whole step in one call.

        VerifierUnavailable replaces the grade of a pair on which our workers failed. UNDECIDED means that the reference
        is at fault, never the prediction. Deterministic unless a limit is hit. Source: paper §2.2.1 says only
        "rule-based"; release: either of two graders accepts."""
        at_once = [self._decide_at_once(pair) for pair in pairs]
        answers = iter(await self._symbolic.compare([one for one in at_once if isinstance(one, Question)]))
        found = [next(answers) if isinstance(one, Question) else one for one in at_once]
        return [
            one
            if isinstance(one, VerifierUnavailable)
            else Grade(*one, None if one[1] == "no_answer" else pair.predicted)
            for pair, one in zip(pairs, found, strict=True)
        ]

    def grade_now(self, pairs: Sequence[Pair]) -> list[Grade]:
        """`grade_all` for callers without an event loop, or inside another's. Blocks."""
        return blocking(self.grade_all(pairs))

    async def close(self) -> None:
        """End the worker processes."""
        await self._symbolic.close()

    def _decide_at_once(self, pair: Pair) -> Found | Question:
        """A verdict that needs no symbolic mathematics, else the question for the workers."""
        if pair.predicted is None or not pair.predicted.strip():
            return Verdict.WRONG, "no_answer"
        if pair.gold == pair.predicted and len(pair.predicted) > MAX_CHARS:
            return Verdict.RIGHT, "text"
        for text, verdict in ((pair.predicted, Verdict.WRONG), (pair.gold, Verdict.UNDECIDED)):
            if len(text) > MAX_CHARS:
                return verdict, "too_long"
        gold, predicted = clean(pair.gold), clean(pair.predicted)
        for grader in self._at_once:
            if found := grader(gold, predicted):
                return found
        if refused := _refused(gold, predicted):
            return refused
        if not self._graders:
            return Verdict.UNDECIDED, "unsure"
        return Question(graders=self._graders, gold=gold, predicted=predicted)


def _refused(gold: str, predicted: str) -> Found | None:
    """Texts that are not parsed. An unreadable prediction, or a value larger than any reference, is wrong: if it were
    undecided, a policy could leave its group by writing it."""
    for text, verdict in ((gold, Verdict.UNDECIDED), (predicted, Verdict.WRONG)):
        if reason := refusal(text):
            return verdict, reason
    return None


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from any thread, also from one whose event loop is running."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="grade") as thread:
        return thread.submit(asyncio.run, work).result()
