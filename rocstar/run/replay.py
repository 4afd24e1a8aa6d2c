"""Repeats the learning of an RL step from the run folder: its attempts, and the newest checkpoint before it. Needs no
engine and no sandbox. Steps between the checkpoint and the requested one are repeated on the way.

Every result must be bit-identical: rewards, choice, advantages, log-probabilities, metrics and, if a checkpoint was
kept, weights. Source: ours."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.answers.grade import Grader
from rocstar.cluster import start_ranks
from rocstar.config.recipe import resolved_from_json
from rocstar.config.sections import Recipe, RlStage
from rocstar.dialogue.codec import Codec
from rocstar.errors import ConfigError, DataError
from rocstar.learning.models import load_model, use_threads
from rocstar.learning.policy import Policy
from rocstar.learning.step import LearnedStep, learn_step, rl_learner
from rocstar.parts.build import AttemptParts
from rocstar.parts.modelfolder import find_model
from rocstar.record.folder import RunFolder, copy_metrics, share
from rocstar.record.journal import read_journal
from rocstar.record.rollouts import (
    SHORT_COLUMNS,
    AttemptRecord,
    attempts_table,
    in_row_groups,
    problem_of,
    read_table,
    rows_of_step,
    trajectory_of,
)
from rocstar.run.checkpoints import opened
from rocstar.run.report import attempt_records, mean_of_updates, step_metrics
from rocstar.support.plugins import is_reference
from rocstar.support.screen import plural
from rocstar.support.weights import state_of
from rocstar.types import Group, Problem, Trajectory, seed_for

COMPARED = {
    "choice": ("kept", "reason", "weight", "penalty_errors", "penalty_format", "penalty_total"),
    "advantages": ("advantage",),
    "log-probabilities": ("old_logprobs", "entropies"),
}
"""Columns of an attempt that follow from its text, the settings and the weights."""
LEARNT_FROM = (*SHORT_COLUMNS, "prompt_ids", "token_ids", "sampled_logprobs")
"""Columns that trajectories are made of."""
THREADS = ("threads.count", "run.threads")
"""What another number of threads is called in the changes of a run, and was called before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive steps of one RL stage, the first directly after a checkpoint."""

    run: RunFolder
    recipe: Recipe
    stage: RlStage
    stage_begun: int
    """The step before the stage's first one."""
    begun: int
    """The step before the first of these, whose checkpoint the run keeps; 0 for the run's beginning."""
    last: int
    recorded: Mapping[int, Mapping[str, Any]]
    """The run's rows of metrics, by step."""
    learners: int
    """Number of learner processes of these steps; another number sums in another order."""

    @property
    def steps(self) -> range:
        return range(self.begun + 1, self.last + 1)

    @property
    def checkpoint(self) -> Path | None:
        return self.run.checkpoint(self.begun) if self.begun else None


def spans_of(run: RunFolder) -> list[Span]:
    """One for each RL stage, from its first step that can be replayed to its last. Raises ConfigError, DataError."""
    recorded = _recorded(run)
    last = {row["stage"]: step for step, row in recorded.items()}
    stages = [stage.name for stage in resolved_from_json(run.resolved).rl_stages if stage.name in last]
    if not stages:
        raise ConfigError(f"run {run.name} has made no RL step yet")
    return [_span(run, recorded, last[name], min) for name in stages]


def span_of(run: RunFolder, step: int) -> Span:
    """The steps from the newest checkpoint before `step` up to it. Raises ConfigError, DataError."""
    return _span(run, _recorded(run), step, max)


def _recorded(run: RunFolder) -> dict[int, Mapping[str, Any]]:
    return {row["step"]: row for row in read_journal(run.metrics)}


def _span(
    run: RunFolder, recorded: Mapping[int, Mapping[str, Any]], last: int, choose: Callable[[list[int]], int]
) -> Span:
    """choose: picks one of the checkpoints' steps."""
    recipe = resolved_from_json(run.resolved)
    if last not in recorded:
        there = f"its steps go to {max(recorded)}" if recorded else "it has made none"
        raise ConfigError(f"run {run.name} has no step {last}; {there}")
    name = recorded[last]["stage"]
    stage = next((one for one in recipe.stage if one.name == name), None)
    if not isinstance(stage, RlStage):
        raise ConfigError(f"step {last} of run {run.name} is of stage {name}; only RL steps are replayed")
    stage_begun = min(step for step, row in recorded.items() if row["stage"] == name) - 1
    kept = [step for step in run.checkpoint_steps() if stage_begun <= step < last]
    if not kept and (stage_begun or recipe.model.path is None):
        raise DataError(
            f"run {run.name} keeps no checkpoint of steps {stage_begun} to {last - 1}, one of which step {last} is "
            "replayed from; run.keep_checkpoints sets how many stay besides those at the end of a stage"
        )
    begun = choose(kept) if kept else 0
    own = f"stage.{stage.name}."
    length = f"{own}steps", f"{own}end."  # settings of the stage that no step depends on
    for change in run.changes:
        setting = change["setting"]
        mine = setting in THREADS or (setting.startswith(own) and not setting.startswith(length))
        if mine and change["step"] > begun:
            raise ConfigError(
                f"{setting} is another one after step {change['step']} of run {run.name}, and the replay "
                f"begins at step {begun}; replay a step that a later checkpoint comes before"
            )
    learners = _learners(run, recipe.cluster.learners, range(begun + 1, last + 1))
    return Span(
        run=run,
        recipe=recipe,
        stage=stage,
        stage_begun=stage_begun,
        begun=begun,
        last=last,
        recorded=recorded,
        learners=learners,
    )


def _learners(run: RunFolder, default: int, steps: range) -> int:
    """The number of learner processes of the steps, from the newest start of the run before each. default: by the
    recipe, if no start records it. Raises ConfigError if the number changed."""
    starts = [row for row in read_journal(run.events) if row["event"] in ("begun", "resumed") and "learners" in row]
    found = {step: next((row["learners"] for row in reversed(starts) if row["step"] < step), default) for step in steps}
    if len(set(found.values())) > 1:
        other = next(step for step in steps if found[step] != found[steps[-1]])
        raise ConfigError(
            f"step {other} of run {run.name} was made by {plural(found[other], 'learner')} and step {steps[-1]} by "
            f"{found[steps[-1]]}, and a replay has one number; replay one that a checkpoint between them comes before"
        )
    return found[steps[-1]]


def write_bundle(span: Span, target: Path) -> None:
    """Write a run folder with only what the replay needs. The model of `model.path` is not included; it must be
    available if the replay begins with it or it has adapters. Raises ConfigError if `target` exists, OSError."""
    if target.exists():
        raise ConfigError(f"{target} already exists; give another name")
    target.mkdir(parents=True)
    run = span.run
    copy_metrics(run, RunFolder(target), span.last)
    parts = [run.resolved, *map(run.rollout_file, span.steps)]
    checkpoints = [step for step in run.checkpoint_steps() if span.begun <= step <= span.last]
    shutil.copyfile(run.events, RunFolder(target).events)  # a copy, since the run may append to its own
    for part in (*parts, *map(run.checkpoint, checkpoints), run.path / "run.json"):  # run.json makes it a run folder
        share(part, target / part.relative_to(run.path))


class Replay:
    """A run's RL stage, learnt again from a checkpoint on. Close it."""

    def __init__(self, span: Span) -> None:
        """Raises ConfigError, DataError, OSError."""
        self.span, self.run, self.recipe, self.stage = span, span.run, span.recipe, span.stage
        use_threads(self.run.identity.get("threads", {}).get("count", 1))
        cluster = self.recipe.cluster.model_copy(update={"launcher": "processes", "learners": self.span.learners})
        self._ranks = start_ranks(cluster, self.recipe.model, os.environ)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ranks.close()

    def step(self, step: int) -> dict[str, Any]:
        """Learn from a step again; call it for consecutive steps in order. Returns its `step`, what `differs` from the
        record and how, by name, the number of `metrics` compared, and whether it has `weights` in a checkpoint, which
        were compared too."""
        groups, version = self.groups(step), self.policy.version
        run = self.recipe.run
        learnt = learn_step(self.stage, self.learner, groups, seed=run.seed, step=step, folders=run.modules)
        return self._compared(step, groups, learnt, version)

    def groups(self, step: int) -> list[Group]:
        """The step's attempts as they were recorded, in order. Raises DataError."""
        groups: list[tuple[Problem, list[Trajectory]]] = []
        for row in rows_of_step(self.run, step, LEARNT_FROM):
            made, last = trajectory_of(row), groups[-1][1][-1] if groups else None
            if last is None or made.problem_id != last.problem_id or made.index <= last.index:
                groups.append((problem_of(row), []))
            groups[-1][1].append(made)
        return [Group(problem=problem, trajectories=tuple(siblings)) for problem, siblings in groups]

    def _open(self) -> None:
        recipe, checkpoint, inside = self.recipe, self.span.checkpoint, self.span.begun > self.span.stage_begun
        base = None
        if checkpoint is None or recipe.model.lora_rank:
            assert recipe.model.path is not None  # the span and the recipe ask for it
            base = find_model(recipe.model.path)
        if checkpoint is not None:
            model, codec = opened(checkpoint, base)
        else:
            assert base is not None
            model, codec = load_model(base), Codec.load(base)
        self.template = AttemptParts(recipe).template(checkpoint / "model" if checkpoint else base)
        seed = seed_for(recipe.run.seed, "adapters")
        self.policy = Policy(model, codec, self.template, recipe.model, ranks=self._ranks, seed=seed)
        if checkpoint:
            self.policy.restore(checkpoint)
            self.policy.version = state_of(checkpoint)["policy_version"]
        done = [stage for stage in recipe.stage[: recipe.stage.index(self.stage)] if stage.steps]
        before = done[-1] if done else None
        self.learner = rl_learner(
            self.policy, self.stage, recipe.run.modules, before=before, newest=checkpoint, inside=inside
        )

    def _compared(self, step: int, groups: Sequence[Group], learnt: LearnedStep, version: int) -> dict[str, Any]:
        differs = {}
        recorded = read_table(self.run.rollout_file(step), [name for columns in COMPARED.values() for name in columns])
        records = attempt_records(learnt.chosen, learnt.rows, policy_version=version)
        other = _other_columns(step, records, recorded)
        for what, columns in COMPARED.items():
            if names := [name for name in columns if name in other]:
                differs[what] = f"{', '.join(names)} of the attempts"
        # A user's own verifier may cost money, or answer differently now; an agent's answer is not recorded.
        decides = not (is_reference(self.recipe.evaluate.verifier) or self.recipe.rollout.agent)
        if decides and (count := asyncio.run(self._other_outcomes(groups))):
            differs["rewards"] = f"those of {plural(count, 'attempt')}"
        metrics = {**step_metrics(learnt.chosen, learnt.rows, version), **mean_of_updates(learnt.updates)}
        row = self.span.recorded[step]
        for name in (name for name, value in metrics.items() if row.get(name) != value):
            differs[name] = f"{metrics[name]!r}, recorded {row.get(name)!r}"
        has_checkpoint = step in self.run.checkpoint_steps()
        if has_checkpoint and (distance := self.policy.distance(self.run.checkpoint(step))):
            differs["weights"] = f"by up to {distance:.3g} from those of the checkpoint"
        return {"step": step, "differs": differs, "metrics": len(metrics), "weights": has_checkpoint}

    async def _other_outcomes(self, groups: Sequence[Group]) -> int:
        pairs = [(group.problem, one) for group in groups for one in group.trajectories if one.outcome is not None]
        grader = Grader()
        try:
            judge = AttemptParts(self.recipe).verifier(self.stage.rollout, self.policy.codec, self.template, grader)
            found = await judge.verify_all(pairs)
        finally:
            await grader.close()
        return sum(outcome != one.outcome for (_, one), outcome in zip(pairs, found, strict=True))


def _other_columns(step: int, records: Sequence[AttemptRecord], recorded: Any) -> set[str]:
    """The columns of the recorded attempts that these do not have again, a row group in memory at a time."""
    if len(records) != len(recorded):
        return set(recorded.column_names)
    other, begin = set[str](), 0
    for some in in_row_groups(records):
        again, before = attempts_table(step, some, None), recorded.slice(begin, len(some))
        other |= {name for name in before.column_names if not again[name].equals(before[name].cast(again[name].type))}
        begin += len(some)
    return other
