"""Accuracy under smaller token caps, from the attempts of one evaluation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocstar.evaluation.figures import figure
from rocstar.evaluation.intervals import mean_over_problems
from rocstar.types import Group, Stop, Trajectory, Verdict

BUDGETS = (4096, 8192, 16384, 30720)
"""Tokens; the last is the paper's cap (§5.1, 30K)."""


def accuracy_by_budget(groups: Sequence[Group], cap: int | None) -> dict[str, Any]:
    """`avg_within_<b>_tokens` for the budgets up to `cap`, under which the attempts were made. An attempt is right
    within b where it is right and ended within b tokens: what it would have been under that cap, except where a model
    is told its cap. Undecided attempts and faults of ours are left out, as in avg@k. Source: ours."""
    budgets = [budget for budget in BUDGETS if cap is not None and budget <= cap]
    return {f"avg_within_{budget}_tokens": figure(mean_over_problems(_shares(groups, budget))) for budget in budgets}


def _shares(groups: Sequence[Group], budget: int) -> list[float]:
    decided = [[a for a in group.trajectories if _is_decided(a)] for group in groups]
    return [sum(_is_right(a, budget) for a in attempts) / len(attempts) for attempts in decided if attempts]


def _is_decided(attempt: Trajectory) -> bool:
    fault = attempt.stop is Stop.ENVIRONMENT_FAILED
    return not fault and attempt.outcome is not None and attempt.outcome.verdict is not Verdict.UNDECIDED


def _is_right(attempt: Trajectory, budget: int) -> bool:
    right = attempt.outcome is not None and attempt.outcome.verdict is Verdict.RIGHT
    return right and attempt.num_response_tokens <= budget
