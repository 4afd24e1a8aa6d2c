"""The Verifiers: from a finished attempt to an Outcome. Reward is 1.0 for RIGHT and 0.0 otherwise, nothing else counts;
only functions of one's own (`plugin.py`) give others.

An attempt that ended ENVIRONMENT_FAILED says nothing about the model and must never get here. An attempt that was cut
(MAX_TURNS, MAX_TOKENS) is WRONG with method `truncated`, whatever it holds (paper §2.2.1: truncated attempts fail);
`truncated="graded"` looks at it like any other, for evaluations that want that. Tool calls are no words of an answer:
they are taken out before anything is looked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Literal

from rocstar.answers.extract import answer_blocks, boxed_answer, last_answer, strict_answer
from rocstar.answers.grade import Grade, Grader, Pair
from rocstar.answers.numbers import MAX_CHARS, parse_number
from rocstar.dialogue.calls import HERMES, CallSyntax
from rocstar.errors import ContractBroken, VerifierUnavailable
from rocstar.protocols import TextCodec
from rocstar.types import FormatFacts, Outcome, Problem, Stop, Trajectory, Verdict

TOOL_TOLERANCE = Fraction(1, 1000)  # relative; what published word-problem solvers are scored with
_ZERO_TOLERANCE = Fraction(1, 10**9)  # absolute; float noise around a reference of 0

Truncated = Literal["wrong", "graded"]
"""What an attempt is that a limit or the end of its agent has cut: WRONG, or looked at like any other."""
CUT = (Stop.MAX_TOKENS, Stop.MAX_TURNS, Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT)


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
        """VerifierUnavailable stands in the place of an attempt on which our workers failed, and is raised when they
        are gone. Raises ContractBroken for an ENVIRONMENT_FAILED trajectory."""
        cut = [settled(trajectory, self.truncated) for _, trajectory in attempts]
        texts = [written(self.codec, self.calls, trajectory) for _, trajectory in attempts]
        pairs = [
            Pair(gold=problem.answer, predicted=self._answer(said))
            for (problem, _), said, grade in zip(attempts, texts, cut, strict=True)
            if grade is None
        ]
        graded = iter(await self.grader.grade_each(pairs))
        return [
            outcome(grade or next(graded), said, self.codec.decode(trajectory.prompt_ids))
            for (_, trajectory), grade, said in zip(attempts, cut, texts, strict=True)
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
        grade = settled(trajectory, self.truncated) or _grade_output(problem.answer, _last_output(trajectory))
        texts = written(self.codec, self.calls, trajectory)
        return outcome(grade, texts, self.codec.decode(trajectory.prompt_ids))


def settled(trajectory: Trajectory, truncated: Truncated) -> Grade | None:
    """WRONG for an attempt that a limit cut, unless such are graded; None for one to be looked at. Raises
    ContractBroken for an ENVIRONMENT_FAILED trajectory."""
    if trajectory.stop is Stop.ENVIRONMENT_FAILED:
        raise ContractBroken(
            f"attempt {trajectory.problem_id}/{trajectory.index} ended ENVIRONMENT_FAILED and has no outcome to verify."
        )
    is_wrong = truncated == "wrong" and trajectory.stop in CUT
    return Grade(Verdict.WRONG, "truncated", None) if is_wrong else None


def written(codec: TextCodec, calls: CallSyntax, trajectory: Trajectory, ends: Collection[int] = ()) -> list[str]:
    """What the assistant wrote, one text per turn, without its tool calls and a last token that is one of `ends`;
    replies are left out, so neither a tool nor a program can answer for the model."""
    completions = (turn.completion.token_ids for turn in trajectory.turns)
    bare = (ids[:-1] if ids and ids[-1] in ends else ids for ids in completions)
    return [calls.strip(codec.decode(ids)) for ids in bare]


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


def format_facts(texts_of_turns: Sequence[str], prompt: str = "<answer>") -> FormatFacts:
    """Look at what the assistant wrote, one text per turn; tool replies and template text must not be in it. The prompt
    says whether an answer block was asked for: that of our template `paper` does, those of `compact` and of most
    published models do not, whatever stands in the question or in an environment's own words counts too.

    Blocks do not span turns. The release counts over the whole response and reads tags in tool output as the
    model's own; ours cannot. Source: paper §2.2.2 (extra `<reason>` after `<answer>`) and eq. 5."""
    tags = [len(answer_blocks(text)) for text in texts_of_turns]
    return FormatFacts(
        answer_tags=sum(tags),
        reason_after_answer=_reason_after_answer(texts_of_turns, tags),
        boxed=any(boxed_answer(text) is not None for text in texts_of_turns),
        answer_asked="<answer>" in prompt,
    )


def _reason_after_answer(texts: Sequence[str], tags: Sequence[int]) -> bool:
    first = next((turn for turn, count in enumerate(tags) if count), None)
    if first is None:
        return False
    # The first *block* closes at the first closing tag that has an opening tag before it.
    closed = texts[first].index("</answer>", texts[first].index("<answer>"))
    return "<reason>" in texts[first][closed:] or any("<reason>" in text for text in texts[first + 1 :])
