"""The interface of scorers: a Scorer is a Verifier that may add a benchmark's own figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rocstar.answers.extract import counts_as_cut, format_facts, written
from rocstar.dialogue.calls import CallSyntax
from rocstar.dialogue.marked_calls import without_end
from rocstar.errors import VerifierUnavailable
from rocstar.evaluation.chat_client import ChatClient
from rocstar.evaluation.intervals import Estimate, Z, wilson
from rocstar.protocols import TextCodec
from rocstar.types import Group, Outcome, Problem, Trajectory, Verdict

if TYPE_CHECKING:
    from rocstar.evaluation.recall import Recall


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Judges attempts of one kind of benchmark: a Verifier, total and bounded in time, that may add figures."""

    codec: TextCodec
    """Turns token ids of the attempts into text."""
    calls: CallSyntax
    """The syntax of tool calls in their text."""
    recall: Recall
    """Stores a judge's answers."""
    judge: ChatClient | None = None
    """Another model, which judges answers."""

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """Raises ContractBroken for an ENVIRONMENT_FAILED attempt, and what `outcome` raises."""
        return [self.outcome(problem, attempt) for problem, attempt in attempts]

    def outcome(self, problem: Problem, attempt: Trajectory) -> Outcome:
        """The verdict on one attempt."""
        raise NotImplementedError

    def figures(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        """Further keys of the result, from judged attempts; pure."""
        return {}

    def final_text(self, attempt: Trajectory) -> str:
        """The text of the last turn, without tool calls and without its end marker. Reasoning in a closed `<think>`
        block is not part of an answer. Raises ContractBroken for an ENVIRONMENT_FAILED attempt."""
        counts_as_cut(attempt, "graded")
        texts = written(self.codec, self.calls, attempt)
        text = without_end(texts[-1]) if texts else ""
        _, closed, answer = text.rpartition("</think>")
        return answer.lstrip("\n") if closed else text


def judged(right: bool, *, method: str, extracted: str | None, text: str) -> Outcome:
    """An Outcome from a plain yes or no."""
    return Outcome(
        verdict=Verdict.RIGHT if right else Verdict.WRONG,
        reward=float(right),
        extracted=extracted,
        method=method,
        format_facts=format_facts([text]),
    )


def ratio(parts_P: Sequence[tuple[float, int]]) -> Estimate:
    """Sum of the first over sum of the second, such as instructions followed of instructions given, with a 95%
    interval that treats the pair (a problem) as the unit: the normal one of a ratio estimator, or Wilson's over
    problems where all have the same ratio."""
    pairs = [(part, whole) for part, whole in parts_P if whole]
    n, total = len(pairs), sum(whole for _, whole in pairs)
    if not n:
        return wilson(0, 0)
    value = sum(part for part, _ in pairs) / total
    residuals = [part - value * whole for part, whole in pairs]
    spread = sqrt(sum(r * r for r in residuals) / max(1, n - 1)) / fmean(whole for _, whole in pairs)
    if spread == 0:
        return wilson(value * n, n)
    half = Z * spread / sqrt(n)
    return Estimate(value, max(0.0, value - half), min(1.0, value + half), n)
