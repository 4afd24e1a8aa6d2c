"""Quality of one trajectory: the penalties that RoC prefers low. Facts in, numbers out.

Not here: choosing trajectories (`resample.py`), and any reading of text: failed calls come from `ToolResult.is_error`,
answer tags from the verifier's count; the release searches tool replies for "error" (docs/roc.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rocstar.config.sections import ResampleSection
from rocstar.types import Penalty, Trajectory

NO_CALL_PENALTY = 0.5  # half of "every call failed": the paper uses it to encourage trying the tool at all
GRAM, OFTEN = 5, 5  # Phi-4-Reasoning counts 5-grams that occur more than 5 times


def penalty(trajectory: Trajectory, settings: ResampleSection) -> Penalty:
    """p_err and weighted p_format of one trajectory. Source: paper §2.2.3, eq. 4-5, whose prompt asks for an answer
    block. Ours: p_format is 0 if the prompt does not ask for one (docs/roc.md).

    Every completion is a turn, as in the paper; the release omits the first. A trajectory without an outcome has no
    counted answer tag, hence p_format 1; it is never trained on, the number is only recorded."""
    facts = trajectory.outcome.format_facts if trajectory.outcome else None
    plain = penalty_of(
        calls=trajectory.num_calls,
        failed_calls=trajectory.num_failed_calls,
        answer_blocks=facts.answer_tags if facts else 0,
        turns=len(trajectory.turns),
        asked=facts is None or facts.answer_asked or settings.format_penalty == "always",
    )
    repetition = settings.repetition_weight * repeated_share(trajectory) if settings.repetition_weight else 0.0
    return replace(plain, format=settings.format_weight * plain.format, repetition=repetition)


def penalty_of(*, calls: int, failed_calls: int, answer_blocks: int, turns: int, asked: bool = True) -> Penalty:
    """The same from plain counts, for trainers that do not share our types. `turns` are all completions, at least 1;
    asked: whether the prompt asks for an answer block. Source: paper §2.2.3, eq. 4-5. Raises ValueError for impossible
    counts."""
    if not (0 <= failed_calls <= calls and answer_blocks >= 0 and turns >= min(1, answer_blocks)):
        counts = f"{calls} calls, {failed_calls} of them failed, {answer_blocks} answer blocks, {turns} turns"
        raise ValueError(f"no attempt has {counts}; correct the counts")
    errors = failed_calls / calls if calls else NO_CALL_PENALTY
    form = min(1.0, (answer_blocks - 1) / turns) if answer_blocks else 1.0
    return Penalty(errors=errors, format=form if asked else 0.0)


def has_void_turn(trajectory: Trajectory) -> bool:
    """Whether a turn has neither a call that parses nor, as the last one, an answer. Source: SimpleTIR (arXiv
    2509.02479), which takes such attempts out of the policy update; ours leave the comparison of rewards too."""
    outcome = trajectory.outcome
    facts = outcome and outcome.format_facts
    answered = bool(facts and outcome and (outcome.extracted is not None or facts.boxed or facts.answer_tags))
    calls = [any(call.parse_error is None for call in turn.calls) for turn in trajectory.turns]
    return not all([*calls[:-1], answered or all(calls[-1:])])


def repeated_share(trajectory: Trajectory) -> float:
    """Of the 5-grams that the policy wrote, the share that occur more than 5 times, 0 to 1. Source:
    Phi-4-Reasoning's detector, as the paper names it; the share is ours."""
    written = [turn.completion.token_ids for turn in trajectory.turns]
    counts = Counter(tuple(ids[i : i + GRAM]) for ids in written for i in range(len(ids) - GRAM + 1))
    return sum(count for count in counts.values() if count > OFTEN) / max(1, counts.total())
