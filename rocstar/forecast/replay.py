"""What `rocstar simulate RUN` takes from a run folder: the work of recorded steps, its engines, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.errors import DataError
from rocstar.forecast.engine_model import EngineModel, torch_engine
from rocstar.forecast.fit import Fit, Trial, fit
from rocstar.forecast.workload import PlannedAttempt, planned
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_rollouts
from rocstar.rollout.kv_scheduler import KvScheduler

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

    def fitted(self) -> Fit:
        """Costs with which the simulated attempts end when the recorded ones did. Raises DataError."""
        most = max(len(step.attempts) for step in self.steps)
        if most > FITTED_ATTEMPTS:
            raise DataError(
                f"a recorded step has {most} attempts and costs are fitted to at most {FITTED_ATTEMPTS}; {GIVE}"
            )
        if self.overlapped:
            keys = "rollout.max_staleness_steps or rollout.carry_over"
            raise DataError(f"with {keys} the attempts of a step do not begin together; {GIVE}")
        return fit(self.model, self.steps)


def recorded(name: str, runs: Path, *, last: int | None, steps: int, cap: int | None) -> RecordedRun:
    """The run's recorded steps up to `last`, `steps` of them. Raises ConfigError, and DataError where there are not so
    many."""
    folder = RunFolder.find(name, runs)
    settings = json.loads(folder.resolved.read_text())
    rows = [read_rollouts(folder, number) for number in _chosen(folder, last, steps)]
    longest = max(row["response_tokens"] for attempts in rows for row in attempts)
    engines = sum(entry.get("count", 1) for entry in settings.get("engine", [])) or 1
    limit = cap or max(settings["rollout"]["max_response_tokens"], longest)
    found = [_recorded_step(attempts, limit, engines) for attempts in rows]
    stages = [stage.get("rollout", {}) for stage in settings["stage"]]
    overlapped = any(
        rollout.get("max_staleness_steps") or rollout.get("carry_over") for rollout in (settings["rollout"], *stages)
    )
    longest = max(attempt.prompt_tokens + attempt.limit for step in found for attempt in step.attempts)
    return RecordedRun(steps=found, engines=engines, model=engine_of(settings, longest), overlapped=overlapped)


def _chosen(folder: RunFolder, last: int | None, steps: int) -> list[int]:
    there = sorted(int(file.stem.partition("=")[2]) for file in folder.rollouts.glob("step=*.parquet"))
    chosen = [number for number in there if last is None or number <= last][-steps:]
    if len(chosen) < steps or (last is not None and chosen[-1] != last):
        raise DataError(f"{folder.path} has rollouts of the steps {there}; choose --step and --steps among them")
    return chosen


def engine_of(settings: dict[str, Any], longest: int) -> EngineModel:
    """As a run's settings have it, without costs; an engine without `kv_tokens` has room for all its rows at `longest`
    tokens."""
    rows, tokens = settings["rollout"]["engine_rows"], settings["rollout"]["kv_tokens"]
    if any(entry["kind"] == "vllm" for entry in settings.get("engine", [])):
        return EngineModel(capacity_tokens=rows * longest, most_running=rows, page_tokens=16)
    return torch_engine(capacity_tokens=tokens or rows * longest, most_running=rows)


def _recorded_step(rows: Iterable[Mapping[str, Any]], limit: int, engines: int) -> Trial:
    """The attempts of one recorded step, as `record.rollouts.read_rollouts` gives them; those of a step begin together.
    An attempt's tool seconds are spread evenly over its tool turns, since only their sum is recorded; attempts that
    never sampled are left out. Raises DataError where nothing is left."""
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
