"""What a step of an engine costs, found so that simulated attempts end when measured ones did. Needs numpy.

A simulation turns costs into the ends of attempts. Least squares turn it round: the ends are linear in the costs as
long as costs do not change who runs beside whom, which holds exactly where all attempts are asked for at once and have
no tools, and nearly elsewhere; so a few Gauss-Newton steps find the costs. Costs below zero make no sense and are kept
out. Errors are those of the logarithms: a short trial counts as much as a long one, twice as slow as much as twice as
fast. Each trial weighs the same, however many attempts it has, since these end together.

Not here: how the ends were measured (played.py, or a run's record).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from rocstar.errors import DataError
from rocstar.forecast.baselines import RoundRobin
from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulate import simulate
from rocstar.forecast.workload import PlannedAttempt, TurnLengths
from rocstar.rollout.scheduler import Scheduler

COSTS = (
    "step_seconds",
    "seconds_per_cached_token",
    "seconds_per_sequence",
    "seconds_per_prefill_token",
    "seconds_per_request",
)
ROUNDS = 12  # of Gauss-Newton; without tools the first is exact
PROBE = 0.02  # of a cost's size: the change that shows a slope; the order of events jumps, so it must not be tiny
ENOUGH = 1e-3  # relative gain of a round below which there is nothing more to find
NO_TIME = 1e-12  # seconds in the place of zero, which has no logarithm
EXACT = 1e-7  # relative error that no clock shows
HALVINGS = 4
WAVES = 3  # fillings of the cache, one after another, in the designed workload that only feeds

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Attempts that were asked for at once, and when they had ended."""

    attempts: Sequence[PlannedAttempt]
    ends: Sequence[float]
    """Of each, in their order; seconds since they were asked for, above zero."""
    engines: int = 1
    """Alike, that shared them."""
    scheduler: Callable[[], Scheduler] = RoundRobin
    """Makes the one that shared them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    model: EngineModel
    """With the costs found."""
    errors: tuple[float, ...]
    """By trial: the simulated makespan over the measured one, less one."""
    spread: float
    """Root of the mean squared relative error of the attempts' ends."""


def fit(model: EngineModel, trials: Sequence[Trial]) -> Fit:
    """`model` gives the sizes and the rules; its costs are not looked at. Raises DataError where nothing was
    measured."""
    if not trials or any(end <= 0 for trial in trials for end in trial.ends):
        raise DataError("costs are fitted to attempts that took some time; there is a trial without")
    measured = np.concatenate([np.asarray(trial.ends, dtype=float) for trial in trials])
    scales = _scales(model, trials)
    weights = np.concatenate([np.full(len(trial.ends), len(trial.ends) ** -0.5) for trial in trials])

    def missed(shares: Floats) -> Floats:
        guess = with_costs(model, shares * scales)
        ends: Floats = np.concatenate([_ends(guess, trial) for trial in trials])
        errors: Floats = weights * np.log(np.maximum(ends, NO_TIME) / measured)
        return errors

    found = with_costs(model, _least(missed, np.full(len(COSTS), 1 / len(COSTS))) * scales)
    ends = [_ends(found, trial) for trial in trials]
    errors = tuple(float(own.max() / max(trial.ends)) - 1 for own, trial in zip(ends, trials, strict=True))
    return Fit(model=found, errors=errors, spread=float(np.sqrt(np.mean((np.concatenate(ends) / measured - 1) ** 2))))


def with_costs(model: EngineModel, costs: Sequence[float] | Floats) -> EngineModel:
    """The same engine with these costs, in the order of COSTS; seconds."""
    named: dict[str, Any] = {name: float(cost) for name, cost in zip(COSTS, costs, strict=True)}
    return replace(model, **named)


def designed(model: EngineModel, *, longest: int) -> list[list[PlannedAttempt]]:
    """Workloads for one engine that tell its costs apart: alone, in small and large batches, with short and long
    contexts up to a full cache, with much to feed, and with many short turns. `longest`: most tokens of one attempt.
    Most take a hundred steps or more, since a few steps say less than what else the machine does meanwhile. Nobody
    gives way; with much to feed most wait for room first."""
    short, long = max(2, longest // 16), max(4, longest // 2)
    some, rest = max(1, longest // 4), max(1, longest - long - short)

    def fitting(tokens: int) -> int:
        """Attempts of so many tokens that the cache holds at once, each with a page more."""
        return max(1, min(model.most_running, model.capacity_tokens // model.in_pages(tokens + model.page_tokens)))

    full, deep, few = fitting(short + some), fitting(long + rest), max(1, fitting(short + some) // 4)
    return [
        *(_alike(count, short, (some,)) for count in sorted({1, few, full})),
        *(_alike(count, long, (rest,)) for count in sorted({1, deep})),
        _alike(WAVES * fitting(long + 1), long, (1,)),
        _alike(few, short, (1,) * some),
        _alike(few, short, tuple(range(1, 1 + max(1, short // 2)))),
    ]


def _alike(count: int, prompt: int, sampled: Sequence[int]) -> list[PlannedAttempt]:
    """Attempts of different problems, with one token of reply between turns and no wait."""
    turns = (*(TurnLengths(tokens, 1, 0.0) for tokens in sampled[:-1]), TurnLengths(sampled[-1], 0, 0.0))
    limit = sum(sampled) + len(sampled)
    return [PlannedAttempt(group=f"{place}", prompt_tokens=prompt, turns=turns, limit=limit) for place in range(count)]


def _ends(model: EngineModel, trial: Trial) -> Floats:
    engines = {f"engine{place}": model for place in range(trial.engines)}
    return np.array(simulate(trial.attempts, engines, trial.scheduler()).ends)


def _scales(model: EngineModel, trials: Sequence[Trial]) -> Floats:
    """For each cost, what it would be if there were no other."""
    taken = sum(max(trial.ends) for trial in trials)
    alone = [
        sum(_ends(with_costs(model, one), trial).max() for trial in map(_without_tools, trials))
        for one in np.eye(len(COSTS))
    ]
    return taken / np.array(alone)


def _without_tools(trial: Trial) -> Trial:
    attempts = [
        replace(attempt, turns=tuple(turn._replace(tool_seconds=0.0) for turn in attempt.turns))
        for attempt in trial.attempts
    ]
    return replace(trial, attempts=attempts)


# -- least squares ----------------------------------------------------------------------------------------------------


def _least(missed: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Where the sum of squares of `missed` is least, nothing below zero; Gauss-Newton with halved steps."""
    here, error = start, missed(start)
    for _ in range(ROUNDS):
        if error @ error < EXACT**2:
            break
        slopes = np.stack([(missed(here + step) - error) / PROBE for step in PROBE * np.eye(len(here))], axis=1)
        goal = nonnegative(slopes, slopes @ here - error)
        tries = [here + (goal - here) * 0.5**halving for halving in range(HALVINGS)]
        found = next(((there, new) for there in tries if (new := missed(there)) @ new < error @ error), None)
        if found is None:
            break
        gained = 1 - (found[1] @ found[1]) / (error @ error)
        here, error = found
        if gained < ENOUGH:
            break
    return here


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    """The x, nothing below zero, for which matrix @ x is nearest to target. A few columns only: every choice of those
    above zero is tried."""
    rotation, triangle = np.linalg.qr(matrix)
    goal, best, least = rotation.T @ target, np.zeros(matrix.shape[1]), np.inf
    for count in range(matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), count)):
            values = np.linalg.lstsq(triangle[:, columns], goal, rcond=None)[0] if columns else np.zeros(0)
            if (values < 0).any() or not np.isfinite(values).all():  # infinite of a column next to nothing
                continue
            distance = float(np.sum((triangle[:, columns] @ values - goal) ** 2))
            if distance < least:
                least, best = distance, np.zeros(matrix.shape[1])
                best[columns] = values
    return best
