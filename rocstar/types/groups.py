"""Siblings, and the fate that resampling gives to each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rocstar.types.problems import Problem
from rocstar.types.trajectories import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    problem: Problem
    """What the siblings attempt."""
    trajectories: tuple[Trajectory, ...]
    """Verified siblings, each with an outcome."""

    @property
    def rewards_G(self) -> tuple[float, ...]:
        return tuple(t.outcome.reward if t.outcome else 0.0 for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """RoC's quality of one trajectory; lower is better. Source: paper §2.2.3, eq. 4-5."""

    errors: float
    """p_err: 0.5 without any tool call, else failed calls / calls."""
    format: float
    """p_format, times `resample.format_weight`: 1 without an answer tag, else min(1, (tags - 1) / turns); 0 where the
    prompt asks for none."""
    repetition: float = 0.0
    """Weighted share of repeated 5-grams; 0 unless `resample.repetition_weight` is set, which the paper leaves out."""

    @property
    def total(self) -> float:
        """p_total: 0 to 2, and repetition on top."""
        return self.errors + self.format + self.repetition


class Reason(StrEnum):
    """Why a trajectory was kept or dropped; every attempt of a step gets exactly one."""

    KEPT_ALL = "kept.all"  # nothing to choose: plain GRPO, or a group no larger than G
    KEPT_UNIFORM = "kept.uniform"  # drawn without looking
    KEPT_NEGATIVE = "kept.negative"  # a failure, drawn uniformly
    KEPT_QUALITY = "kept.quality"  # a success, drawn inversely to its penalty
    KEPT_LOWEST_PENALTY = "kept.lowest_penalty"  # a success, among the cleanest
    DROPPED_UNIFORM = "dropped.uniform"
    DROPPED_NEGATIVE = "dropped.negative"
    DROPPED_QUALITY = "dropped.quality"
    DROPPED_HIGHER_PENALTY = "dropped.higher_penalty"
    DROPPED_EQUAL_REWARDS = "dropped.equal_rewards"  # the group has no signal
    DROPPED_TOO_FEW = "dropped.too_few_siblings"
    DROPPED_ENVIRONMENT = "dropped.environment_failed"
    DROPPED_UNDECIDED = "dropped.undecided"
    DROPPED_TRUNCATED = "dropped.truncated"  # cut by the token limit, under overlong filtering


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fate of one trajectory of a group."""

    index: int
    """Position in `Group.trajectories`."""
    kept: bool
    reason: Reason
    penalty: Penalty
    weight: float = 0.0
    """Relative probability of being drawn; 0 where no draw was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """A resampler's answer. `choices` has one entry per trajectory of the group, in its order."""

    group: Group
    choices: tuple[Choice, ...]

    @property
    def kept(self) -> tuple[Trajectory, ...]:
        return tuple(self.group.trajectories[c.index] for c in self.choices if c.kept)

    @property
    def dropped(self) -> tuple[Trajectory, ...]:
        return tuple(self.group.trajectories[c.index] for c in self.choices if not c.kept)
