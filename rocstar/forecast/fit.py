"""Fits the costs of an engine's step so that simulated attempts end when the measured ones did. Needs numpy.

A simulation turns costs into the ends of attempts. Least squares invert it: the ends are linear in the costs as long as
costs do not change which attempts run together, which holds exactly if all attempts start at once and have no tools,
and nearly otherwise; so a few Gauss-Newton steps find the costs. Negative costs are excluded. Errors are those of the
logarithms: a short trial counts as much as a long one, twice as slow as much as twice as fast. Each trial weighs the
same, however many attempts it has, since these end together.

The ends are those that a run has recorded: at the end, the work of its steps and its engines are read from its folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rocstar.errors import DataError
from rocstar.forecast.engine_model import COSTS, EngineModel, torch_engine, with_costs
from rocstar.forecast.policies import RoundRobin
from rocstar.forecast.simulate import alike, simulate
from rocstar.forecast.workload import PlannedAttempt, planned
from rocstar.record.folder import RunFolder, step_of
from rocstar.record.rollouts import rows_of_step
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.scheduler import Scheduler
from rocstar.support.screen import plural

ROUNDS = 12  # of Gauss-Newton; without tools the first is exact
PROBE = 0.02  # of a cost's size: the change that shows a slope; the order of events jumps, so it must not be tiny
ENOUGH = 1e-3  # relative gain of a round below which there is nothing more to find
NO_TIME = 1e-12  # seconds in the place of zero, which has no logarithm
EXACT = 1e-7  # relative error that no clock shows
HALVINGS = 4

LENGTHS = ("problem_id", "prompt_ids", "turns", "response_tokens", "seconds", "tool_seconds")
"""What of a recorded attempt is looked at."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Attempts that started at once, and their end times."""

    attempts: Sequence[PlannedAttempt]
    ends: Sequence[float]
    """End time of each attempt: seconds since the common start, above zero."""
    engines: int = 1
    """Alike, that shared them."""
    scheduler: Callable[[], Scheduler] = RoundRobin
    """Makes the one that shared them out."""


def fit(model: EngineModel, trials: Sequence[Trial]) -> tuple[EngineModel, list[float]]:
    """The engine with the costs that were found, and for each trial the simulated makespan over the measured one, less
    one. `model` gives the sizes and the rules; its costs are ignored. Raises DataError if nothing was measured."""
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
    return found, [float(_ends(found, trial).max() / max(trial.ends)) - 1 for trial in trials]


def _ends(model: EngineModel, trial: Trial) -> Floats:
    return np.array(simulate(trial.attempts, alike(model, trial.engines), trial.scheduler()).ends)


def _scales(model: EngineModel, trials: Sequence[Trial]) -> Floats:
    """For each cost, the value that it would have if it were the only one."""
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
    """The point without negatives where the sum of squares of `missed` is least: Gauss-Newton with halved steps."""
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


# -- what `rocstar simulate RUN` takes from a run folder --------------------------------------------------------------

FITTED_ATTEMPTS = 2048  # of a recorded step at most; a step of the paper has 16,384, and is simulated a hundred times

GIVE = "give --step-seconds, --cached-token-seconds, --sequence-seconds and --prefill-token-seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Steps of a run and the engines that did them."""

    steps: list[Trial]
    engines: int
    model: EngineModel
    """Sizes and rules of each; no costs."""
    overlapped: bool
    """Attempts of several steps may have been under way at once, beside learning."""

    def fitted(self) -> tuple[EngineModel, list[float]]:
        """As `fit`, to the recorded steps. Raises DataError."""
        most = max(len(step.attempts) for step in self.steps)
        if most > FITTED_ATTEMPTS:
            raise DataError(
                f"a recorded step has {most} attempts and costs are fitted to at most {FITTED_ATTEMPTS}; {GIVE}"
            )
        if self.overlapped:
            keys = "rollout.max_staleness_steps or rollout.refill"
            raise DataError(f"with {keys} the attempts of a step do not begin together; {GIVE}")
        return fit(self.model, self.steps)


def recorded(name: str, runs: Path, *, last: int | None, steps: int, cap: int | None) -> RecordedRun:
    """The run's recorded steps up to `last`, `steps` of them. Raises ConfigError, and DataError where there are not so
    many."""
    folder = RunFolder.find(name, runs)
    settings = json.loads(folder.resolved.read_bytes())
    rows = [list(rows_of_step(folder, number, LENGTHS)) for number in _chosen(folder, last, steps)]
    longest = max(row["response_tokens"] for attempts in rows for row in attempts)
    engines = sum(entry.get("count", 1) for entry in settings.get("engine", [])) or 1
    limit = cap or max(settings["rollout"]["max_response_tokens"], longest)
    found = [_recorded_step(attempts, limit, engines) for attempts in rows]
    stages = [stage.get("rollout", {}) for stage in settings["stage"]]
    keys = ("max_staleness_steps", "carry_over", "refill")  # carry_over: of earlier versions
    overlapped = any(rollout.get(key) for rollout in (settings["rollout"], *stages) for key in keys)
    longest = max(attempt.prompt_tokens + attempt.limit for step in found for attempt in step.attempts)
    return RecordedRun(steps=found, engines=engines, model=engine_of(settings, longest), overlapped=overlapped)


def _chosen(folder: RunFolder, last: int | None, steps: int) -> list[int]:
    there = sorted(map(step_of, folder.rollouts.glob("step=*.parquet")))
    chosen = [number for number in there if last is None or number <= last][-steps:]
    if len(chosen) < steps or (last is not None and chosen[-1] != last):
        between = f", from {there[0]} to {there[-1]}" if there else ""
        raise DataError(
            f"{folder.path} has rollouts of {plural(len(there), 'step')}{between}; choose --step and --steps among them"
        )
    return chosen


def engine_of(settings: dict[str, Any], longest: int) -> EngineModel:
    """As a run's settings have it, without costs; an engine without `kv_tokens` has room for all its rows at `longest`
    tokens."""
    rows, tokens = settings["rollout"]["engine_rows"], settings["rollout"]["kv_tokens"]
    if any(entry["kind"] == "vllm" for entry in settings.get("engine", [])):
        return EngineModel(capacity_tokens=rows * longest, most_running=rows, page_tokens=16)
    return torch_engine(capacity_tokens=tokens or rows * longest, most_running=rows)


def _recorded_step(rows: Iterable[Mapping[str, Any]], limit: int, engines: int) -> Trial:
    """The attempts of one recorded step, as rows of LENGTHS; those of a step begin together. An attempt's tool seconds
    are spread evenly over its tool turns, since only their sum is recorded; attempts that never sampled are left out.
    Raises DataError where nothing is left."""
    found = [(attempt, row["seconds"]) for row in rows if (attempt := _recorded(row, limit)) is not None]
    if not found:
        raise DataError("the recorded step has no attempt that sampled a token; choose another step")
    attempts, ends = zip(*found, strict=True)
    return Trial(attempts=attempts, ends=ends, engines=engines, scheduler=KvScheduler)


def _recorded(row: Mapping[str, Any], limit: int) -> PlannedAttempt | None:
    turns = [turn for turn in row["turns"] if turn["sampled_tokens"]]
    if not turns:
        return None
    wait = (row["tool_seconds"] or 0.0) / max(1, len(turns) - 1)
    lengths = [(turn["sampled_tokens"], turn["reply_tokens"]) for turn in turns]
    return planned(row["problem_id"], len(row["prompt_ids"]), lengths, wait=wait, limit=limit)
