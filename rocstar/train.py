"""The story of training. One RL step, which is what everything else is there for (`RlStage.step`):

    problems [P] -> rollouts [P][R] -> resampled groups [P'][G] -> scored rows -> optimizer updates -> new weights

Around it: the stages of a recipe in order, evaluation before and after, checkpoints, and going on where a run
stopped. A "step" is one pass of a stage's loop: one optimizer update for SFT, one rollout batch with
`learning.updates_per_step` updates for RL.

What a step does follows from (run.seed, step) and the weights alone, so a resumed run repeats itself exactly.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rocstar.answers.grade import Grader
from rocstar.config import DataSection, Recipe, Stage
from rocstar.errors import RunHalted
from rocstar.evaluation.evaluate import Protocol, evaluate_policy
from rocstar.launch import Stopper
from rocstar.learning.batches import rows_of, split
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.resample import resampler_named
from rocstar.learning.sft import SftLearner
from rocstar.learning.threads import use_threads
from rocstar.protocols import Resampler
from rocstar.rollout.collect import Roller
from rocstar.runs.atomic import write_json
from rocstar.runs.folder import RunFolder
from rocstar.runs.journal import read_journal
from rocstar.runs.show import summary_of
from rocstar.runs.tracker import RunTracker
from rocstar.sandbox.client import SandboxClient
from rocstar.screen import Screen
from rocstar.training.assemble import (
    Workshop,
    learner_settings,
    make_engine,
    make_roller,
    sft_settings,
    weights_folder,
)
from rocstar.training.checkpoints import Progress, latest, prune, save
from rocstar.training.coldstart import load_sft_rows, opened_policy, opening, rows_of_step
from rocstar.training.meter import Meter
from rocstar.training.pools import problems_of_step, stage_pool
from rocstar.training.report import attempt_records, fault_share, remarks, step_metrics
from rocstar.training.tasks import Task, make_task
from rocstar.types import BatchRow, Problem, Resampled, SftRow, Weights, seed_for


async def train(
    recipe: Recipe, folder: RunFolder, screen: Screen, sandbox: SandboxClient, *, resume: bool, stopper: Stopper
) -> None:
    """Carry out all stages that are not done yet. Raises RunHalted, and KeyboardInterrupt after a save on Ctrl-C."""
    use_threads(recipe.run.threads)
    meter = Meter(sandbox)
    recipe = recipe.model_copy(update={"stage": [stage for stage in recipe.stage if stage.steps]})
    task = task_of(recipe, recipe.data)
    found = latest(folder) if resume else None
    progress, checkpoint = found or (Progress(), None)
    if resume:
        folder.rewind(progress.step)
        screen.note(f"going on after step {progress.step}")
    with meter.phase("cold start"):
        if checkpoint is None:
            screen.stage("cold start", "demonstrations, tokenizer, model")
            policy = await opening(recipe, task, sandbox, folder.path)
        else:
            policy = opened_policy(recipe, checkpoint)
            policy.version = progress.policy_version
    positions = recipe.model.max_positions if not recipe.model.path else policy.model.config.max_position_embeddings
    workshop = Workshop(
        policy=policy,
        engine=make_engine(policy, recipe.rollout, min(positions, recipe.model.max_positions)),
        sandbox=sandbox,
        grader=Grader(),
    )
    with RunTracker(folder, decode=policy.codec.decode) as tracker:
        run = Run(
            recipe=recipe,
            folder=folder,
            screen=screen,
            stopper=stopper,
            meter=meter,
            task=task,
            workshop=workshop,
            tracker=tracker,
            progress=progress,
            checkpoint=checkpoint,
        )
        try:
            await run.all_stages()
        finally:
            await workshop.close()


def task_of(recipe: Recipe, data: DataSection) -> Task:
    """The task of a `[data]` section; held-out problems depend on the run only, so stages share them."""
    return make_task(data, tool_name=recipe.rollout.tool_name, seed=recipe.run.seed, heldout=recipe.evaluate.problems)


@dataclass(slots=True, kw_only=True)
class Run:
    """A run under way: what all stages share."""

    recipe: Recipe
    folder: RunFolder
    screen: Screen
    stopper: Stopper
    meter: Meter
    task: Task
    workshop: Workshop
    tracker: RunTracker
    progress: Progress
    checkpoint: Path | None
    """Where learner state is restored from: the newest checkpoint."""
    saved_at: float = 0.0

    async def all_stages(self) -> None:
        complete = self.progress.stage + self.progress.stage_complete
        for number, stage in enumerate(self.recipe.stage):
            if number < complete:
                continue
            if stage.kind == "rl" and not self._rl_before(number):
                await self.evaluate("before", stage)
            self._enter(number, stage)
            await (self._sft(stage) if stage.kind == "sft" else self._rl(stage))
        await self.evaluate("after", self.recipe.stage[-1])
        self._finish()

    # -- stages ---------------------------------------------------------------------------------------------------

    def _rl_before(self, number: int) -> bool:
        under_way = self.progress.stage == number and self.progress.stage_step > 0
        return under_way or any(stage.kind == "rl" for stage in self.recipe.stage[:number])

    def _enter(self, number: int, stage: Stage) -> None:
        if self.progress.stage != number:
            self.progress = Progress(stage=number, step=self.progress.step, policy_version=self.workshop.policy.version)
        self.tracker.start_stage(stage.name, stage.kind, stage.steps)
        self.saved_at = time.monotonic()

    async def _sft(self, stage: Stage) -> None:
        self.screen.stage(stage.name, f"{stage.steps} steps of imitation, {stage.sft.batch_rows} demonstrations each")
        rows = load_sft_rows(self.folder.path)
        learner = SftLearner(self.workshop.policy, sft_settings(stage.sft, stage.steps))
        if self.progress.stage_step and self.checkpoint:
            learner.restore(self.checkpoint)

        async def step(index: int) -> Mapping[str, float]:
            with self.meter.phase("sft"):
                return self._sft_step(stage, learner, rows, index)

        await self._loop(stage, learner, step)

    def _sft_step(self, stage: Stage, learner: SftLearner, rows: list[SftRow], index: int) -> dict[str, float]:
        seed = self.recipe.run.seed
        batch = rows_of_step(rows, index, stage.sft.batch_rows, seed)
        return learner.update(batch, seed=seed_for(seed, "dropout", self.progress.step + 1))

    async def _rl(self, stage: Stage) -> None:
        workshop, seed = self.workshop, self.recipe.run.seed
        roller = make_roller(workshop, stage.rollout, stage.sandbox, stage.evaluate)
        learner = GrpoLearner(
            workshop.policy,
            learner_settings(stage.learning, stage.rollout.temperature),
            weights_folder(self.folder.path),
        )
        self._carry_optimizer(stage, learner)
        await workshop.engine.load_weights(learner.publish())
        with self.meter.phase("pool"):
            problems = task_of(self.recipe, stage.data).problems()
            pool = await stage_pool(stage, problems, roller, seed=seed, run=self.folder.path)
        if not pool:
            self._nothing_left(stage, learner)
            return
        self.screen.stage(
            stage.name,
            f"{stage.steps} steps of {stage.rollout.problems_per_step} problems x "
            f"{stage.rollout.attempts_per_problem} attempts from {len(pool)} problems, "
            f"at most {stage.rollout.max_response_tokens} tokens",
        )
        rl = RlStage(
            stage=stage,
            roller=roller,
            resample=resampler_named(
                stage.resample.method, stage.resample.keep, stage.resample.min_positive, stage.resample.min_negative
            ),
            learner=learner,
            load_weights=workshop.engine.load_weights,
            tracker=self.tracker,
            meter=self.meter,
            fault_budget=self.recipe.run.fault_budget,
            save_rollouts=self.recipe.run.save_rollouts,
        )

        async def step(index: int) -> Mapping[str, float]:
            problems = problems_of_step(pool, index, stage.rollout.problems_per_step, seed_for(seed, stage.name))
            return await rl.step(self.progress.step + 1, problems, seed_for(seed, "step", self.progress.step + 1))

        await self._loop(stage, learner, step)
        for remark in remarks(stage.name, [r for r in read_journal(self.folder.metrics) if r["stage"] == stage.name]):
            self.screen.note(remark)

    def _carry_optimizer(self, stage: Stage, learner: GrpoLearner) -> None:
        """Optimizer state goes on from the newest checkpoint, within a stage and from one RL stage to the next."""
        inside = self.progress.stage_step > 0
        follows = self.progress.stage > 0 and self.recipe.stage[self.progress.stage - 1].kind == "rl"
        if self.checkpoint and (inside or (follows and not stage.learning.reset_optimizer)):
            learner.restore(self.checkpoint)
            if not inside:
                learner.refresh_reference()

    def _nothing_left(self, stage: Stage, learner: GrpoLearner) -> None:
        self.screen.note(
            f"{stage.name}: every problem is solved by all {stage.data.drop_solved_attempts} attempts; nothing is left "
            "to learn, so the stage is skipped"
        )
        self.tracker.event("stage_skipped", name=stage.name)
        self.progress.stage_step = stage.steps
        self._save(learner, complete=True)

    async def _loop(
        self,
        stage: Stage,
        learner: SftLearner | GrpoLearner,
        step: Callable[[int], Awaitable[Mapping[str, float]]],
    ) -> None:
        """Run a stage's steps from where it stands; save now and then, at its end and when asked to stop."""
        while self.progress.stage_step < stage.steps:
            metrics = {**await step(self.progress.stage_step), **self.meter.take()}
            metrics["step/trainer_cpu_seconds"] = sum(
                metrics.get(f"cpu/{phase}", 0.0) for phase in ("rollout", "learning", "record", "sft")
            )
            self.progress.stage_step += 1
            self.progress.step += 1
            self.progress.policy_version = self.workshop.policy.version
            self.tracker.log(self.progress.step, {"stage_step": self.progress.stage_step, **metrics})
            self.screen.step(stage.name, self.progress.stage_step, stage.steps, metrics)
            done = self.progress.stage_step == stage.steps
            due = time.monotonic() - self.saved_at >= self.recipe.run.checkpoint_seconds
            if done or due or self.stopper.asked:
                self._save(learner, complete=done)
            if self.stopper.asked:
                raise KeyboardInterrupt

    # -- keeping ----------------------------------------------------------------------------------------------------

    def _save(self, learner: SftLearner | GrpoLearner, *, complete: bool) -> None:
        """Raises RunHalted when an earlier write failed: a checkpoint newer than the record would hide the hole."""
        self.tracker.flush()
        if self.tracker.failure:
            raise RunHalted(f"{self.tracker.failure} with: rocstar train --resume {self.folder.name}")
        self.progress.stage_complete = complete
        save(self.folder, self.progress, self.workshop.policy, learner)
        prune(self.folder, self.recipe.run.keep_checkpoints)
        self.checkpoint = self.folder.checkpoint(self.progress.step)
        self.saved_at = time.monotonic()

    async def evaluate(self, name: str, stage: Stage) -> None:
        """Evaluate on the held-out problems with the settings of `stage`, once."""
        problems = self.task.heldout()
        folder = self.folder.evaluation(name, self.progress.step)
        if not problems or (folder / "result.json").exists():
            return
        self.screen.stage(name, f"evaluation on {len(problems)} held-out problems")
        with self.meter.phase("evaluation"):
            weights = self.workshop.policy.publish(weights_folder(self.folder.path))
            await self.workshop.engine.load_weights(weights)
            roller = make_roller(self.workshop, stage.rollout, stage.sandbox, stage.evaluate)
            protocol = Protocol(
                attempts=stage.evaluate.attempts,
                temperature=stage.evaluate.temperature,
                greedy=stage.evaluate.greedy,
                seed=self.recipe.run.seed,
            )
            await evaluate_policy(roller, problems, protocol, folder=folder, step=self.progress.step)

    def _finish(self) -> None:
        self.tracker.flush()
        results = {name: result for name, _, result in self.folder.evaluations()}
        summary = summary_of(results, [*read_journal(self.folder.metrics), self.meter.take()])
        write_json(self.folder.summary, summary)


@dataclass(slots=True, kw_only=True)
class RlStage:
    """The parts of one RL stage."""

    stage: Stage
    roller: Roller
    resample: Resampler
    learner: GrpoLearner
    load_weights: Callable[[Weights], Awaitable[None]]
    tracker: RunTracker
    meter: Meter
    fault_budget: float
    save_rollouts: bool

    async def step(self, step: int, problems: list[Problem], seed: int) -> dict[str, float]:
        """One step. Returns its metrics. Raises RunHalted when too many attempts ended by faults of ours."""
        settings = self.stage
        with self.meter.phase("rollout"):
            groups = await self.roller.roll(
                problems,
                attempts=settings.rollout.attempts_per_problem,
                seed=seed,
                temperature=settings.rollout.temperature,
                top_p=settings.rollout.top_p,
                top_k=settings.rollout.top_k,
            )
        with self.meter.phase("learning"):
            chosen = [self.resample(g, random.Random(seed_for(seed, "resample", g.problem.id))) for g in groups]
            rows = self.learner.score(rows_of(chosen, settings.learning.normalize_by_std))
            learnt = _mean_of([self.learner.update(b) for b in split(rows, settings.learning.updates_per_step, seed)])
            await self.load_weights(self.learner.publish())
            metrics = step_metrics(chosen, rows)
        self._record(step, chosen, rows)
        self._check_faults(step, chosen)
        return {**metrics, **learnt}

    def _record(self, step: int, chosen: list[Resampled], rows: tuple[BatchRow, ...]) -> None:
        if not self.save_rollouts:
            return
        with self.meter.phase("record"):
            self.tracker.record_attempts(
                step,
                attempt_records(
                    chosen,
                    rows,
                    normalize_by_std=self.stage.learning.normalize_by_std,
                    policy_version=self.learner.version,
                ),
            )

    def _check_faults(self, step: int, chosen: list[Resampled]) -> None:
        share = fault_share(chosen)
        faults = [t.fault for r in chosen for t in r.group.trajectories if t.fault]
        if faults:
            self.tracker.event("faults", step=step, share=share, first=faults[0])
        if share > self.fault_budget:
            raise RunHalted(
                f"step {step}: {share:.0%} of the attempts ended by faults of ours, run.fault_budget allows "
                f"{self.fault_budget:.0%}; the first says: {faults[0]}"
            )


def _mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step's updates, averaged; nothing when there was nothing to learn from."""
    if not updates:
        return {"learn/updates": 0.0}
    names = updates[0].keys()
    return {"learn/updates": float(len(updates))} | {
        f"learn/{name}": sum(update[name] for update in updates) / len(updates) for name in names
    }
