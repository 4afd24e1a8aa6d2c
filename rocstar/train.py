"""The story of training. One RL step (`rl_step`), which is what everything else is there for:

    problems [P] -> rollouts [P][R] -> resampled groups [P'][G] -> scored rows -> optimizer updates -> new weights

A *step* is one pass of a stage's loop: an SFT step learns from one batch of demonstrations, an RL step from one batch
of rollouts, in `learning.updates_per_step` optimizer updates.

What a step does follows from (run.seed, step) and the weights alone, so a resumed run repeats itself exactly. Two
things make tokens depend on time as well: engines of kind vllm, whose batches round differently, and
`rollout.max_staleness_steps`, with which attempts are made ahead of the updates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rocstar.cluster import Machines
from rocstar.config.sections import RlStage, SftStage
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.sft import SftLearner
from rocstar.learning.step import LearnedStep, choice_of_step, learn_step, rl_learner
from rocstar.parts.build import sampling_of
from rocstar.parts.threads import begin_threads
from rocstar.record.folder import RunFolder
from rocstar.rollout.collect import RolledStep, Roller
from rocstar.run.ahead import RolloutProgress, StepsAhead, update_summary
from rocstar.run.evaluations import evaluate, evaluate_previous, evaluate_when_due
from rocstar.run.material import Material, few_problems
from rocstar.run.opening import opened_run
from rocstar.run.pools import problems_of_step, refilled, stage_pool
from rocstar.run.report import (
    agent_metrics,
    mean_of_updates,
    rolled_metrics,
    staleness_metrics,
    step_metrics,
    suspicion,
    tool_metrics,
)
from rocstar.run.rows import load_sft_rows, rows_of_step
from rocstar.run.run import Run
from rocstar.run.steps import steps_of
from rocstar.run.stopper import Stopper
from rocstar.support.screen import Screen, plural
from rocstar.types import Group, Problem, Weights, seed_for


async def train(
    material: Material, folder: RunFolder, screen: Screen, machines: Machines, *, resume: bool, stopper: Stopper
) -> None:
    """Carry out all stages that are not done, between an evaluation before the first RL stage and one at the end.
    Raises RunHalted, and KeyboardInterrupt after a save on Ctrl-C."""
    weights = material.pretrained.folder if material.pretrained else None
    begin_threads(material.recipe, weights, folder.identity.get("threads", {}).get("count"))
    stopper.stops(asyncio.current_task())
    async with opened_run(material, folder, screen, machines, resume=resume, stopper=stopper) as run:
        for stage in run.stages_left():
            await evaluate_previous(run)
            if stage.rollouts and run.is_before_rl():
                await evaluate(run, "before")
            await KINDS[stage.kind](run, stage)
        await evaluate(run, "after")
        run.finish()


async def imitate(run: Run, stage: SftStage) -> None:
    """An SFT stage: next-token loss on demonstrations."""
    rows, seed = load_sft_rows(run.folder.path, stage.name), run.recipe.run.seed
    learner = SftLearner(run.policy, stage.sft, steps=stage.steps)
    if run.progress.stage_step and run.checkpoints.newest:
        learner.restore(run.checkpoints.newest)
    run.announce(stage, f"{plural(stage.steps, 'step')} of imitation, {stage.sft.batch_rows} demonstrations each")
    await run.turn_to_learners()
    with steps_of(run, stage, learner) as steps:
        for step in steps.left():
            with run.meter.phase("sft"), run.watch.telling(lambda seconds: update_summary(seconds, *run.policy.learnt)):
                batch = rows_of_step(rows, step, stage.sft.batch_rows, seed)
                metrics = learner.update(batch, seed=seed_for(seed, "dropout", run.progress.step + 1))
            steps.done({**metrics, "step/tokens": metrics["tokens"]})


async def reinforce(run: Run, stage: RlStage) -> None:
    """An RL stage: GRPO-RoC on the stage's problems."""
    roller = run.roller(stage.rollout)
    modules = run.recipe.run.modules
    before, inside = run.previous_stage(), run.progress.stage_step > 0
    learner = rl_learner(run.policy, stage, modules, before=before, newest=run.checkpoints.newest, inside=inside)
    await run.publish()
    with run.meter.phase("pool"):
        pool = await stage_pool(
            stage,
            run.material.problems[stage.name],
            roller,
            seed=run.recipe.run.seed,
            run=run.folder,
            version=run.policy.version,
            fault_budget=run.recipe.run.fault_budget,
            progress=lambda done, total: run.screen.counted(f"{stage.name} pool", done, total, "problems asked"),
        )
    if not pool:
        run.skip(stage, learner, f"every problem is solved by all {stage.data.drop_solved_attempts} attempts")
        return
    rollout = stage.rollout
    if few := few_problems(stage, len(pool)):
        run.screen.note(few)
    run.announce(
        stage,
        f"{plural(stage.steps, 'step')} of {min(rollout.problems_per_step, len(pool))} problems x "
        f"{rollout.attempts_per_problem} attempts from {len(pool)} problems, "
        f"at most {rollout.max_response_tokens} tokens"
        + (f", {stage.learning.advantage} advantages" if stage.learning.advantage != "grpo" else "")
        + (f", up to {plural(rollout.refill, 'round')} of further groups" if rollout.refill else ""),
    )
    with steps_of(run, stage, learner) as steps:
        async with ahead_of_learning(run, stage, roller, pool) as attempts:
            for step in steps.left():
                await run.probe_when_due()
                await evaluate_when_due(run, stage.rollout, steps)
                steps.done(await rl_step(run, stage, attempts, learner, step))


KINDS: Mapping[str, Callable[[Run, Any], Awaitable[None]]] = {"sft": imitate, "rl": reinforce}
"""Who carries out a stage, by its kind. What else a kind says of itself is in its class (`config/sections.py`)."""


def ahead_of_learning(run: Run, stage: RlStage, roller: Roller, pool: Sequence[Problem]) -> StepsAhead:
    """The attempts of the stage's steps, made up to `rollout.max_staleness_steps` ahead of learning. No more are under
    way at once than one step has: an attempt of the next step begins when one of this step has ended."""
    rollout, seed, first = stage.rollout, run.recipe.run.seed, run.progress.step - run.progress.stage_step
    at_once = min(rollout.problems_per_step, len(pool)) * rollout.attempts_per_problem
    paced, progress = replace(roller, places=asyncio.Semaphore(at_once)), RolloutProgress(run.watch)

    async def roll(step: int) -> RolledStep:
        problems = problems_of_step(pool, step, rollout.problems_per_step, seed_for(seed, stage.name))
        siblings, step_seed = rollout.attempts_per_problem, seed_for(seed, "step", first + step + 1)
        attempts = progress.begun(step, len(problems) * siblings)
        engine = run.calls.engine(first + step + 1, paced.engine) if run.calls else paced.engine
        counted = replace(paced, engine=engine, ended=attempts.count)
        sampling = sampling_of(rollout)
        roll_all = partial(counted.roll, attempts=siblings, seed=step_seed, sampling=sampling)
        made = await roll_all(problems)
        if not rollout.refill:
            return RolledStep(groups=made)
        choose = choice_of_step(stage, seed, first + step + 1, run.recipe.run.modules)

        async def further(some: Sequence[Problem]) -> list[Group]:
            attempts.total += len(some) * siblings
            return await roll_all(some)

        groups = await refilled(
            made, pool, further, lambda group: len(choose(group).kept) > 1, rounds=rollout.refill, seed=step_seed
        )
        return RolledStep(groups=groups, refilled=len(groups) - len(made))

    return StepsAhead(roll, end=stage.steps, ahead=rollout.max_staleness_steps, waiting=progress.waiting)


async def rl_step(run: Run, stage: RlStage, attempts: StepsAhead, learner: GrpoLearner, step: int) -> dict[str, float]:
    """Take the attempts of a step of the stage, learn from them, give engines the new weights, record. Returns the
    step's metrics. Raises RunHalted when too many attempts ended by faults of ours."""
    written_by = run.policy.version
    with run.meter.phase("rollout"):
        rolled = await attempts.take(step)
        run.tell_calls(run.progress.step + 1)
    with run.meter.phase("learning"):
        await run.turn_to_learners()
        began, learn = time.monotonic(), partial(learn_from, run, stage, learner, rolled.groups)
        with run.watch.telling(lambda seconds: update_summary(seconds, *run.policy.learnt)):
            learnt, weights = await run.beside(learn) if attempts.under_way else learn()
        overlap = attempts.worked_since(began)
        exchange = await run.give(weights, run.progress.step + 1)

    run.record(learnt.chosen, learnt.rows, written_by)
    return {
        **step_metrics(learnt.chosen, learnt.rows, written_by),
        **suspicion(learnt.chosen, run.policy.codec.decode),
        **mean_of_updates(learnt.updates),
        **staleness_metrics(rolled.groups, written_by, stage, overlap),
        **rolled_metrics(rolled, stage),
        **tool_metrics(rolled.groups),
        **(agent_metrics(rolled.groups) if run.recipe.rollout.agent else {}),
        **run.engine.take_counts(),
        **exchange,
    }


def learn_from(run: Run, stage: RlStage, learner: GrpoLearner, groups: Sequence[Group]) -> tuple[LearnedStep, Weights]:
    """Learn from a step's attempts; the new weights are for engines. Touches nothing that attempts under way use, so it
    may run beside them."""
    recipe = run.recipe.run
    step, folders = run.progress.step + 1, recipe.modules
    return learn_step(stage, learner, groups, seed=recipe.seed, step=step, folders=folders), run.weights()
