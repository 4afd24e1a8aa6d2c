"""What the learner makes of a step's attempts, from nothing but them, the stage's settings and the weights: training
does it once (`train.py`), and whoever asks how a step came about does it again (`run/replay.py`). And how it is shown:
what one set of settings made of a run's step, or of another trainer's (`run/dumps.py`), and which tokens carry it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rocstar.config.sections import LearningSection, RlStage, Stage
from rocstar.learning.advantages import advantage_of, part_of, place_of, rows_of, split, top_entropy
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.methods import by_token
from rocstar.learning.policy import Policy
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.types import BatchRow, Group, Resampled, Update, seed_for

Seen = Callable[[Update], None]
Gradient = Mapping[str, torch.Tensor]
"""By parameter, as `GrpoLearner.gradient` gives it; what is missing is 0."""
FORKS = 0.2  # share of tokens of the highest entropy, as in arXiv 2506.01939
MOST_TOKENS, MOST_ATTEMPTS = 10, 8
BEFORE = 8  # tokens that are shown before one


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedStep:
    """What the learner made of a step's attempts."""

    chosen: list[Resampled]
    updates: list[Update]
    rows: list[BatchRow]
    """Rows of all attempts that were kept, scored."""


def rl_learner(
    policy: Policy,
    stage: RlStage,
    folders: Sequence[Path | str],
    *,
    before: Stage | None,
    newest: Path | None,
    inside: bool,
) -> GrpoLearner:
    """The learner of a stage at its beginning, or inside it, at the newest checkpoint. Optimizer state goes on within a
    stage and from one RL stage to the next. before: the stage before."""
    learner = GrpoLearner(policy, stage.learning, temperature=stage.rollout.temperature, folders=folders)
    if newest and (inside or stage.takes_optimizer_of(before)):
        learner.restore(newest)
        if not inside:
            learner.refresh_reference()
    return learner


def choice_of_step(stage: RlStage, seed: int, step: int, folders: Sequence[Path | str]) -> Callable[[Group], Resampled]:
    """Chooses what a step of the run, from 1, learns from of a group."""
    resample = resampler_of(stage.resample, folders)
    return lambda group: resample(group, random.Random(seed_of_choice(seed, step, group.problem.id)))


def learn_step(
    stage: RlStage,
    learner: GrpoLearner,
    groups: Sequence[Group],
    *,
    seed: int,
    step: int,
    folders: Sequence[Path | str],
    seen: Seen | None = None,
) -> LearnedStep:
    """Resample, score, update. seed: of the run; step: of the run, from 1. seen: takes each update before the next one
    begins, with what each token had of its gradient."""
    chosen = list(map(choice_of_step(stage, seed, step, folders), groups))
    made = rows_of(chosen, advantage_of(stage.learning, folders))
    updates, rows = learn_rows(stage.learning, learner, made, seed_for(seed, "step", step), seen)
    return LearnedStep(chosen=chosen, updates=updates, rows=rows)


def learn_rows(
    settings: LearningSection, learner: GrpoLearner, rows: Sequence[BatchRow], seed: int, seen: Seen | None = None
) -> tuple[list[Update], list[BatchRow]]:
    """Score and update: the updates, and all rows, scored. seed: of the shuffle before rows are split."""
    batches = split(rows, settings.updates_per_step, seed)
    narrow = settings.top_entropy_share < 1
    if len(batches) > 1 or narrow or settings.advantage == "otb":  # a single update takes its own pass's logprobs
        batches = [replace(batch, rows=learner.score(batch.rows)) for batch in batches]
    if settings.by_token:
        batches = by_token(batches, settings)
    updates = []
    for batch in batches:
        learnt_from = top_entropy(batch, settings.top_entropy_share) if narrow else batch
        updates.append(learner.update(learnt_from, traced=seen is not None))
        if seen:
            seen(updates[-1])
    return updates, [row for part in (batches if narrow else updates) for row in part.rows]


@dataclass(slots=True, kw_only=True)
class Tried:
    """What one set of settings made of a step."""

    settings: str
    groups: Sequence[Group]
    """The attempts that it was learnt from."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over its updates."""
    gradient: Gradient = field(default_factory=dict)
    """The sum of what its updates applied, clipped, by parameter."""
    rows: list[tuple[BatchRow, Sequence[float]]] = field(default_factory=list)
    """Rows of all its updates, with what each token had of the gradient."""

    def add(self, learner: GrpoLearner, update: Update) -> None:
        """An update that the learner has just made."""
        more = {name: self.gradient.get(name, 0) + value for name, value in learner.gradient().items()}
        self.gradient = {**self.gradient, **more}
        self.rows += zip(update.rows, update.carried, strict=True)

    def told(self, own: Gradient) -> dict[str, Any]:
        """own: the gradient of the run's own settings."""
        tokens, (length, other) = self._tokens(), (math.sqrt(_product(one, one)) for one in (self.gradient, own))
        forks = sorted(tokens, key=lambda one: -one[1].entropies[one[2]])[: round(FORKS * len(tokens))]
        return {
            "settings": self.settings,
            "loss": self.metrics.get("learn/loss"),
            "clip_share": self.metrics.get("learn/clip_share"),
            "gradient_norm": length,
            "cosine": _product(self.gradient, own) / (length * other) if length * other else None,
            "attempts": len({place_of(row) for row, _ in self.rows}),
            "tokens": len(tokens),
            "fork_share": sum(share for share, _, _ in forks) if tokens else None,
        }

    def heaviest(self, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
        """The tokens that carry most of the gradient."""
        found = sorted(self._tokens(), key=lambda one: -one[0])[:MOST_TOKENS]
        return [
            {
                "share": share,
                **_attempt(row, self.groups),
                "place": place + _before(row, self.groups),
                "before": decode(row.token_ids[max(0, place - BEFORE) : place]),
                "token": decode(row.token_ids[place : place + 1]),
                "probability": math.exp(row.old_logprobs[place]),
                "advantage": row.token_advantages[place],
            }
            for share, row, place in found
        ]

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts that carry most of the gradient, with each token's share of it."""
        total, whole = self._total, dict[tuple[int, int], tuple[BatchRow, list[float]]]()
        for row, norms in sorted(self.rows, key=lambda one: part_of(one[0])):
            whole.setdefault(place_of(row), (row, []))[1].extend(norms)
        found = sorted(whole.values(), key=lambda one: -sum(one[1]))[:MOST_ATTEMPTS]
        return [
            {
                "share": sum(carried) / total,
                **_attempt(row, self.groups),
                "advantage": row.advantage,
                "carried": [float(f"{norm / total:.3g}") for norm in carried],
            }
            for row, carried in found
            if sum(carried) > 0
        ]

    def _tokens(self) -> list[tuple[float, BatchRow, int]]:
        """Tokens with a gradient: their share of all norms, their row and their place in it."""
        total = self._total
        return [(norm / total, row, place) for row, norms in self.rows for place, norm in enumerate(norms) if norm > 0]

    @property
    def _total(self) -> float:
        return sum(sum(norms) for _, norms in self.rows)


def _attempt(row: BatchRow, groups: Sequence[Group]) -> dict[str, Any]:
    """row: of the file of attempts, from 0."""
    number, place = place_of(row)
    one, before = groups[number].trajectories[place], sum(len(group.trajectories) for group in groups[:number])
    return {"problem_id": one.problem_id, "index": one.index, "row": before + place}


def _before(row: BatchRow, groups: Sequence[Group]) -> int:
    """Tokens of its attempt's earlier conversations."""
    number, place = place_of(row)
    return sum(len(told.token_ids) for told in groups[number].trajectories[place].conversations[: part_of(row)])


def _product(one: Gradient, other: Gradient) -> float:
    both = sorted(one.keys() & other.keys())
    return sum(float(one[name].double().flatten() @ other[name].double().flatten()) for name in both)
