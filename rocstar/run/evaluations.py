"""Evaluations of a run: when each is due, and that it is made once. A killed one goes on where its journal ends
(`evaluation/recall.py`): its weights come back bit by bit, because a run is saved before it evaluates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocstar.config.sections import Recipe, RlStage, StageRolloutSection
from rocstar.evaluation.evaluate import Protocol, Solver, evaluate_policy, setup_of
from rocstar.evaluation.recall import Recall
from rocstar.learning.models import name_of_dtype
from rocstar.parts.build import rollouts_of
from rocstar.record.journal import read_journal
from rocstar.rollout.collect import Roller
from rocstar.run.benchmarks import NamedBenchmark
from rocstar.run.run import Run
from rocstar.types import Problem


async def evaluate_first(run: Run) -> None:
    """Before any RL has changed the policy, under the limits of the last stage, so that before and after compare."""
    await _on_held_out(run, "before", rollouts_of(run.recipe)[-1])
    await _on_benchmarks(run)


async def evaluate_last(run: Run) -> None:
    await _on_held_out(run, "after", rollouts_of(run.recipe)[-1])
    await _on_benchmarks(run)


async def evaluate_when_due(run: Run, stage: RlStage) -> None:
    """After every `evaluate.every_steps` steps of a stage; not part of a step's time."""
    if run.evaluates_after(run.progress.stage_step):
        await _during(run, stage)
        run.evaluated = run.evaluations()
        run.step_began = time.monotonic()


async def evaluate_previous(run: Run) -> None:
    """The same after the last step of the stage before; that of the last stage is evaluated as `after`."""
    stage = run.previous_stage()
    if isinstance(stage, RlStage) and not run.progress.stage_step:
        done = sum(row["stage"] == stage.name for row in read_journal(run.folder.metrics))
        if run.evaluates_after(done):
            await _during(run, stage)


async def _during(run: Run, stage: RlStage) -> None:
    await _on_held_out(run, "during", stage.rollout)
    await _on_benchmarks(run)


async def _on_held_out(run: Run, name: str, rollout: StageRolloutSection) -> None:
    """Under these limits."""
    settings, problems = run.recipe.evaluate, run.material.heldout
    folder = run.folder.evaluation(name, run.progress.step)
    if not problems or (folder / "result.json").exists():
        return
    fewer = f", fewer than the {settings.problems} asked for" if len(problems) < settings.problems else ""
    run.screen.stage(name, f"evaluation on {len(problems)} held-out problems{fewer}")
    protocol = Protocol(
        attempts=settings.attempts,
        temperature=settings.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=settings.greedy,
        seed=run.recipe.run.seed,
    )
    data = run.recipe.data.model_dump(include={"source", "test_files"})
    roller = run.roller(run.recipe, rollout)
    setup = _setup(run, run.recipe, rollout, roller, problems, protocol, data)
    await _evaluate(run, folder, lambda recall: roller, problems, protocol, setup)


async def _on_benchmarks(run: Run) -> None:
    """Each, where it was not asked after this step."""
    for benchmark in run.material.benchmarks:
        folder = run.folder.evaluation(benchmark.name, run.progress.step)
        if not (folder / "result.json").exists():
            await _on_benchmark(run, benchmark, folder)


async def _on_benchmark(run: Run, benchmark: NamedBenchmark, folder: Path) -> None:
    recipe, problems, kind = benchmark.recipe, benchmark.source.problems, benchmark.source.kind
    run.screen.stage(benchmark.name, f"{len(problems)} problems x {benchmark.protocol.attempts} attempts")
    plain = run.roller(recipe, recipe.rollout)

    def solver(recall: Recall) -> Roller:
        return kind.solver(plain, recall)

    setup = _setup(
        run, recipe, recipe.rollout, solver(Recall()), problems, benchmark.protocol, benchmark.source.described
    )
    await _evaluate(run, folder, solver, problems, benchmark.protocol, setup)


def _setup(
    run: Run,
    recipe: Recipe,
    rollout: StageRolloutSection,
    roller: Roller,
    problems: Sequence[Problem],
    protocol: Protocol,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    return setup_of(
        recipe,
        rollout,
        roller.conversation,
        problems,
        protocol,
        model=run.folder.name,
        step=run.progress.step,
        data=data,
        engine={"device": run.policy.device.type, "dtype": name_of_dtype(run.policy.dtype)},
    )


async def _evaluate(
    run: Run,
    folder: Path,
    solver: Callable[[Recall], Solver],
    problems: Sequence[Problem],
    protocol: Protocol,
    setup: Mapping[str, Any],
) -> None:
    """Raises RunHalted past the fault budget; what was asked is kept, and a resumed run asks for the rest."""
    with Recall(folder) as recall:
        with run.meter.phase("evaluation"):
            await run.publish()
            if recall.found:
                run.screen.note(
                    f"{recall.found} answers are there from an earlier start; only what is missing is asked"
                )
            made = await evaluate_policy(
                solver(recall),
                problems,
                protocol,
                fault_budget=run.recipe.run.fault_budget,
                setup=setup,
                said=run.screen.attempted,
                recall=recall,
            )
            made.write(folder, run.progress.step)
        recall.forget()
