"""Quality of one trajectory: the penalties that RoC prefers low. Facts in, numbers out.

Not here: choosing trajectories (`resample.py`), and any reading of text. A failed call is `ToolResult.is_error` and
an answer tag is one that the verifier counted; the release searches tool replies for the substring "error", which
misses timeouts and calls that do not parse, and blames a program that prints the word.
"""

from __future__ import annotations

from rocstar.types import Penalty, Trajectory

NO_CALL_PENALTY = 0.5  # half of "every call failed": the paper uses it to encourage trying the tool at all


def penalty(trajectory: Trajectory) -> Penalty:
    """p_err and p_format of one trajectory, each 0 to 1. Source: paper §2.2.3, eq. 4-5.

    Turns are all completions, as in the paper; the release misses the first one, so that its clean one-turn
    answers are punished. A trajectory without an outcome shows no answer tag, hence p_format 1; such a one never
    trains, the number is for the record."""
    return Penalty(errors=_error_share(trajectory), format=_format_penalty(trajectory))


def _error_share(trajectory: Trajectory) -> float:
    if trajectory.num_calls == 0:
        return NO_CALL_PENALTY
    return trajectory.num_failed_calls / trajectory.num_calls


def _format_penalty(trajectory: Trajectory) -> float:
    answer_tags = trajectory.outcome.format_facts.answer_tags if trajectory.outcome else 0
    if answer_tags == 0:
        return 1.0
    return min(1.0, (answer_tags - 1) / len(trajectory.turns))
