"""The story of training. One RL step, which is what everything else is there for (`RlStage.step`):

    problems [P] -> rollouts [P][R] -> resampled groups [P'][G] -> scored rows -> optimizer updates -> new weights

Around it: the stages of a recipe in order, evaluation before and after, checkpoints, and going on where a run
stopped. A "step" is one pass of a stage's loop: one optimizer update for SFT, one rollout batch with
`learning.updates_per_step` updates for RL.

What a step does follows from (run.seed, step) and the weights alone, so a resumed run repeats itself exactly.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rocstar.answers.grade import Grader
from rocstar.config import Recipe, Stage
from rocstar.errors import RunHalted
from rocstar.launch import Stopper
from rocstar.learning.batches import rows_of, split
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.resample import resampler_named
from rocstar.learning.sft import SftLearner
from rocstar.learning.threads import use_threads
from rocstar.protocols import Resampler
from rocstar.rollout.collect import Roller
from rocstar.runs.folder import RunFolder
from rocstar.runs.journal import read_journal
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
from rocstar.training.checkpoints import Progress, latest
from rocstar.training.coldstart import load_sft_rows, opened_policy, opening, rows_of_step
from rocstar.training.meter import Meter
from rocstar.training.pools import problems_of_step, stage_pool
from rocstar.training.report import attempt_records, fault_share, mean_of_updates, remarks, step_metrics
from rocstar.training.run import Run
from rocstar.training.tasks import task_of
from rocstar.types import BatchRow, Problem, Resampled, Weights, seed_for


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
            await all_stages(run)
        finally:
            await workshop.close()


async def all_stages(run: Run) -> None:
    """Every stage that is not done, between an evaluation before the first RL stage and one at the end."""
    done = run.stages_done
    for number, stage in enumerate(run.recipe.stage):
        if number < done:
            continue
        if stage.kind == "rl" and not run.rl_before(number):
            await run.evaluate("before", stage)
        run.enter(number, stage)
        await (sft_stage(run, stage) if stage.kind == "sft" else rl_stage(run, stage))
    await run.evaluate("after", run.recipe.stage[-1])
    run.finish()


async def sft_stage(run: Run, stage: Stage) -> None:
    run.screen.stage(stage.name, f"{stage.steps} steps of imitation, {stage.sft.batch_rows} demonstrations each")
    rows, seed = load_sft_rows(run.folder.path), run.recipe.run.seed
    learner = SftLearner(run.workshop.policy, sft_settings(stage.sft, stage.steps))
    if run.progress.stage_step and run.checkpoint:
        learner.restore(run.checkpoint)

    async def step(index: int) -> Mapping[str, float]:
        with run.meter.phase("sft"):
            batch = rows_of_step(rows, index, stage.sft.batch_rows, seed)
            return learner.update(batch, seed=seed_for(seed, "dropout", run.progress.step + 1))

    await run.repeat(stage, learner, step)


async def rl_stage(run: Run, stage: Stage) -> None:
    workshop, seed = run.workshop, run.recipe.run.seed
    roller = make_roller(workshop, stage.rollout, stage.sandbox, stage.evaluate)
    learner = GrpoLearner(
        workshop.policy,
        learner_settings(stage.learning, stage.rollout.temperature),
        weights_folder(run.folder.path),
    )
    _carry_optimizer(run, stage, learner)
    await workshop.engine.load_weights(learner.publish())
    with run.meter.phase("pool"):
        problems = task_of(run.recipe, stage.data).problems()
        pool = await stage_pool(stage, problems, roller, seed=seed, run=run.folder.path)
    if not pool:
        _skip(run, stage, learner)
        return
    run.screen.stage(
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
        tracker=run.tracker,
        meter=run.meter,
        fault_budget=run.recipe.run.fault_budget,
        save_rollouts=run.recipe.run.save_rollouts,
    )

    async def step(index: int) -> Mapping[str, float]:
        problems = problems_of_step(pool, index, stage.rollout.problems_per_step, seed_for(seed, stage.name))
        return await rl.step(run.progress.step + 1, problems, seed_for(seed, "step", run.progress.step + 1))

    await run.repeat(stage, learner, step)
    for remark in remarks(stage.name, [r for r in read_journal(run.folder.metrics) if r["stage"] == stage.name]):
        run.screen.note(remark)


def _carry_optimizer(run: Run, stage: Stage, learner: GrpoLearner) -> None:
    """Optimizer state goes on from the newest checkpoint, within a stage and from one RL stage to the next."""
    inside = run.progress.stage_step > 0
    follows = run.progress.stage > 0 and run.recipe.stage[run.progress.stage - 1].kind == "rl"
    if run.checkpoint and (inside or (follows and not stage.learning.reset_optimizer)):
        learner.restore(run.checkpoint)
        if not inside:
            learner.refresh_reference()


def _skip(run: Run, stage: Stage, learner: GrpoLearner) -> None:
    run.screen.note(
        f"{stage.name}: every problem is solved by all {stage.data.drop_solved_attempts} attempts; nothing is left "
        "to learn, so the stage is skipped"
    )
    run.tracker.event("stage_skipped", name=stage.name)
    run.progress.stage_step = stage.steps
    run.save(learner, complete=True)


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
        settings, written_by = self.stage, self.learner.version
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
            batches = split(rows, settings.learning.updates_per_step, seed)
            learnt = mean_of_updates([self.learner.update(batch) for batch in batches])
            await self.load_weights(self.learner.publish())
            metrics = step_metrics(chosen, rows)
        self._record(step, chosen, rows, written_by)
        self._check_faults(step, chosen)
        return {**metrics, **learnt}

    def _record(self, step: int, chosen: list[Resampled], rows: tuple[BatchRow, ...], policy_version: int) -> None:
        if not self.save_rollouts:
            return
        with self.meter.phase("record"):
            self.tracker.record_attempts(
                step,
                attempt_records(
                    chosen,
                    rows,
                    normalize_by_std=self.stage.learning.normalize_by_std,
                    policy_version=policy_version,
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
