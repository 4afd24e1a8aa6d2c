"""The Verifiers: from a finished attempt to an Outcome. Reward is 1.0 for RIGHT and 0.0 otherwise; only a user's
reward function (`plugin.py`) gives others.

An attempt that ended ENVIRONMENT_FAILED says nothing about the model and must never get here. An attempt that was cut
(MAX_TURNS, MAX_TOKENS) is WRONG with method `truncated`, whatever it holds (paper §2.2.1: truncated attempts fail);
`truncated="graded"` looks at it like any other, for evaluations that want that. Tool calls are no part of an
answer and are removed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

from rocstar.answers.extract import Truncated, counts_as_cut, format_facts, last_answer, strict_answer, written
from rocstar.answers.grade import Grade, Grader, Pair
from rocstar.answers.numbers import MAX_CHARS, parse_number
from rocstar.dialogue.calls import HERMES, CallSyntax
from rocstar.errors import VerifierUnavailable
from rocstar.protocols import TextCodec
from rocstar.types import Outcome, Problem, Trajectory, Verdict

TOOL_TOLERANCE = Fraction(1, 1000)  # relative; what published word-problem solvers are scored with
_ZERO_TOLERANCE = Fraction(1, 10**9)  # absolute; float noise around a reference of 0
TRUNCATED = Grade(Verdict.WRONG, "truncated", None)


@dataclass
class BoxedVerifier:
    """Compares the last boxed answer with the reference."""

    codec: TextCodec
    grader: Grader
    """Stays the caller's: it may be shared, and the caller closes it."""
    _: KW_ONLY
    strict: bool = False
    """Look only inside the last `<answer>` block of the last turn (paper §2.2.1), else for the last box anywhere in
    what the assistant wrote, the reasoning included (as the release does)."""
    truncated: Truncated = "wrong"
    phrases: bool = False
    """Without any box, what the last turn announces as its answer counts; for measuring foreign models, never for
    rewards."""
    calls: CallSyntax = HERMES
    """How the model writes tool calls, which are no part of an answer."""

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """VerifierUnavailable replaces the Outcome of an attempt on which our workers failed, and is raised if none is
        left. Raises ContractBroken for an ENVIRONMENT_FAILED trajectory."""
        cut = [counts_as_cut(trajectory, self.truncated) for _, trajectory in attempts]
        texts = [written(self.codec, self.calls, trajectory) for _, trajectory in attempts]
        pairs = [
            Pair(gold=problem.answer, predicted=self._answer(said))
            for (problem, _), said, is_cut in zip(attempts, texts, cut, strict=True)
            if not is_cut
        ]
        graded = iter(await self.grader.grade_each(pairs))
        return [
            outcome(TRUNCATED if is_cut else next(graded), said, self.codec.decode(trajectory.prompt_ids))
            for (_, trajectory), is_cut, said in zip(attempts, cut, texts, strict=True)
        ]

    def _answer(self, texts: Sequence[str]) -> str | None:
        if self.strict:
            return strict_answer(texts[-1]) if texts else None
        return last_answer(texts, phrases=self.phrases)


@dataclass
class ToolOutputVerifier:
    """Takes the last line that the last tool call printed as the answer, within a relative tolerance of 1e-3.

    For word problems with a model too small to copy a number into a box. A failed last call is no answer; a reference
    that is no number leaves the attempt UNDECIDED. Source: ours."""

    codec: TextCodec
    _: KW_ONLY
    truncated: Truncated = "wrong"
    calls: CallSyntax = HERMES

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """Raises ContractBroken for an ENVIRONMENT_FAILED trajectory."""
        return [self._verify(problem, trajectory) for problem, trajectory in attempts]

    def _verify(self, problem: Problem, trajectory: Trajectory) -> Outcome | VerifierUnavailable:
        is_cut = counts_as_cut(trajectory, self.truncated)
        grade = TRUNCATED if is_cut else _grade_output(problem.answer, _last_output(trajectory))
        texts = written(self.codec, self.calls, trajectory)
        return outcome(grade, texts, self.codec.decode(trajectory.prompt_ids))


def outcome(
    grade: Grade | VerifierUnavailable, texts: Sequence[str], prompt: str, reward: float | None = None
) -> Outcome | VerifierUnavailable:
    """The Outcome of a grade, with the facts about the form of what was written after `prompt`; a failure of ours stays
    one. reward: where it is not that of the verdict."""
    if isinstance(grade, VerifierUnavailable):
        return grade
    return Outcome(
        verdict=grade.verdict,
        reward=float(grade.verdict is Verdict.RIGHT) if reward is None else reward,
        extracted=grade.extracted,
        method=grade.method,
        format_facts=format_facts(texts, prompt),
    )


def _last_output(trajectory: Trajectory) -> str | None:
    results = trajectory.results
    if not results or results[-1].is_error:
        return None
    lines = results[-1].stdout.strip().splitlines()
    return lines[-1].strip() if lines else results[-1].value


def _grade_output(gold: str, output: str | None) -> Grade:
    if output is None:
        return Grade(Verdict.WRONG, "no_answer", None)
    extracted = output[:MAX_CHARS]
    wanted = parse_number(gold)
    if wanted is None:
        return Grade(Verdict.UNDECIDED, "gold_unparsed", extracted)
    given = parse_number(output)
    if given is None or given.comma:
        return Grade(Verdict.WRONG, "tool_output", extracted)
    gap = abs(given.value - wanted.value)
    close = gap <= max(abs(wanted.value) * TOOL_TOLERANCE, _ZERO_TOLERANCE)
    return Grade(Verdict.RIGHT if close else Verdict.WRONG, "tool_output", extracted)
