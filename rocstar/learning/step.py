"""The learner's part of a step, which depends only on its attempts, the stage's settings and the weights: training runs
it once (`train.py`), and a replay of the step runs it again (`run/replay.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocstar.config.sections import LearningSection, RlStage, Stage
from rocstar.learning.advantages import advantage_of, rows_of, split, top_entropy
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.policy import Policy
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.types import BatchRow, Group, Resampled, Update, seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedStep:
    """The learner's results for a step's attempts."""

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
    """The learner of a stage, at its beginning or at its newest checkpoint. Optimizer state is kept within a stage and
    from one RL stage to the next. before: the previous stage."""
    learner = GrpoLearner(policy, stage.learning, temperature=stage.rollout.temperature, folders=folders)
    if newest and (inside or stage.takes_optimizer_of(before)):
        learner.restore(newest)
        if not inside:
            learner.refresh_reference()
    return learner


def choice_of_step(stage: RlStage, seed: int, step: int, folders: Sequence[Path | str]) -> Callable[[Group], Resampled]:
    """Chooses the attempts of a group that a step of the run, counted from 1, learns from."""
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
) -> LearnedStep:
    """Resample, score, update. seed: of the run; step: of the run, from 1."""
    chosen = list(map(choice_of_step(stage, seed, step, folders), groups))
    batch_rows = rows_of(chosen, advantage_of(stage.learning, folders), over_batch=stage.learning.over_batch)
    updates, rows = learn_rows(stage.learning, learner, batch_rows, seed_for(seed, "step", step))
    return LearnedStep(chosen=chosen, updates=updates, rows=rows)


def learn_rows(
    settings: LearningSection, learner: GrpoLearner, rows: Sequence[BatchRow], seed: int
) -> tuple[list[Update], list[BatchRow]]:
    """Score and update: returns the updates, and all rows, scored. seed: of the shuffle before rows are split."""
    batches = split(rows, settings.updates_per_step, seed)
    narrow = settings.top_entropy_share < 1
    several = len(batches) * settings.epochs > 1
    scored = several or narrow  # a single update takes its own pass's logprobs
    learner.expect(rows, scored=scored)
    if scored:
        batches = [learner.score(batch) for batch in batches]
    updates = []
    for batch in batches * settings.epochs:
        learnt_from = top_entropy(batch, settings.top_entropy_share) if narrow else batch
        updates.append(learner.update(learnt_from))
    return updates, [row for rows in (batches if scored else [update.rows for update in updates]) for row in rows]
