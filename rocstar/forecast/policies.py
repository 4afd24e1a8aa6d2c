"""The schedulers that can be simulated, by name."""

from __future__ import annotations

from collections.abc import Sequence

from rocstar.errors import ConfigError
from rocstar.forecast.baselines import BASELINES
from rocstar.forecast.workload import PlannedAttempt
from rocstar.rollout.expected import Clairvoyant
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.scheduler import Scheduler

OURS, CLAIRVOYANT = "rocstar", "clairvoyant"
POLICIES = (*BASELINES, OURS, CLAIRVOYANT)


def scheduler(policy: str, steps: Sequence[Sequence[PlannedAttempt]]) -> Scheduler:
    """A fresh one. `steps` is what will be simulated with it; only the clairvoyant one looks. Raises ConfigError."""
    if policy in BASELINES:
        return BASELINES[policy]()
    if policy == OURS:
        return KvScheduler()
    if policy == CLAIRVOYANT:
        ends = {
            f"{number}/{index}": attempt.response_tokens
            for number, attempts in enumerate(steps)
            for index, attempt in enumerate(attempts)
        }
        return KvScheduler(Clairvoyant(ends))
    raise ConfigError(f"there is no policy {policy!r}; choose of {', '.join(POLICIES)}")
