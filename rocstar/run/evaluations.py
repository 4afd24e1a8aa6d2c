"""Evaluations of a run: each is made once, when it is due. A killed one resumes where its journal ends
(`evaluation/recall.py`), under identical weights, because a run is saved before it evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.config.sections import StageRolloutSection
from rocstar.evaluation.compare import differences
from rocstar.evaluation.evaluate import Protocol, Solver, evaluate_policy, name_of, setup_of
from rocstar.evaluation.recall import Recall
from rocstar.parts.build import AttemptParts
from rocstar.record.journal import read_journal
from rocstar.rollout.collect import Roller
from rocstar.run.benchmarks import NamedBenchmark
from rocstar.run.run import Run
from rocstar.types import Problem

if TYPE_CHECKING:
    from rocstar.run.steps import StageSteps


async def evaluate(run: Run, name: str, rollout: StageRolloutSection | None = None) -> None:
    """Evaluate on the held-out problems and on each benchmark, unless done at this step. rollout: the limits; None:
    those of the last stage, so that `before` and `after` compare."""
    await _on_held_out(run, name, rollout or run.recipe.rollouts[-1])
    for benchmark in run.material.benchmarks:
        folder = run.folder.evaluation(benchmark.name, run.progress.step)
        if not (folder / "result.json").exists():
            await _on_benchmark(run, benchmark, folder)
    if name == "after":
        tell_unlike(run)


def tell_unlike(run: Run) -> None:
    """Warn if `before` and `after`, which the run's last screen compares, were evaluated under different limits: a
    continued run may change or add its last stage."""
    setups = {name: result.get("setup", {}) for name, _, result in run.folder.evaluations()}  # the last of each name
    if not {"before", "after"} <= setups.keys():
        return
    if differ := differences(("before", setups["before"]), ("after", setups["after"])):
        evidence = f"the evaluations differ {next(iter(differ.values()))}"
        action = "their figures do not compare; evaluate the weights of before under today's limits (rocstar eval)"
        run.tracker.event("warning", step=run.progress.step, name="unlike", evidence=evidence, action=action)
        run.screen.note(f"warning: {evidence}; {action}")


async def evaluate_when_due(run: Run, rollout: StageRolloutSection, steps: StageSteps) -> None:
    """Evaluate after every `evaluate.every_steps` steps of a stage, under its limits; not part of a step's time."""
    if run.recipe.evaluate.is_due_after(run.progress.stage_step):
        with steps.evaluating():
            await evaluate(run, "during", rollout)


async def evaluate_previous(run: Run) -> None:
    """Evaluate after the last step of the stage before, if one is due; that of the last stage is `after`."""
    stage = run.previous_stage()
    if stage and stage.rollouts and not run.progress.stage_step:
        done = sum(row["stage"] == stage.name for row in read_journal(run.folder.metrics))
        if run.recipe.evaluate.is_due_after(done):
            await evaluate(run, "during", stage.rollouts[-1])


async def _on_held_out(run: Run, name: str, rollout: StageRolloutSection) -> None:
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
    roller = run.roller(rollout)
    setup = setup_of(run.recipe, rollout, roller.conversation, problems, protocol, **_where(run), data=data)
    await _ask(run, folder, lambda recall: roller, problems, protocol, setup)


async def _on_benchmark(run: Run, benchmark: NamedBenchmark, folder: Path) -> None:
    recipe, problems, kind = benchmark.recipe, benchmark.source.problems, benchmark.source.kind
    run.screen.stage(benchmark.name, f"{len(problems)} problems x {benchmark.protocol.attempts} attempts")
    plain = run.roller(recipe.rollout, AttemptParts(recipe))

    def solver(recall: Recall) -> Roller:
        return kind.solver(plain, recall)

    talk, data = solver(Recall()).conversation, benchmark.source.described
    setup = setup_of(recipe, recipe.rollout, talk, problems, benchmark.protocol, **_where(run), data=data)
    await _ask(run, folder, solver, problems, benchmark.protocol, setup)


def _where(run: Run) -> dict[str, Any]:
    """The run and step whose weights are evaluated, and the device."""
    return {"model": run.folder.name, "step": run.progress.step, "engine": run.policy.computes}


async def _ask(
    run: Run,
    folder: Path,
    solver: Callable[[Recall], Solver],
    problems: Sequence[Problem],
    protocol: Protocol,
    setup: Mapping[str, Any],
) -> None:
    """Raises RunHalted past the fault budget; answers are kept, and a resumed run asks only the rest."""
    with Recall(folder, name_of(setup, folder.parent.name)) as recall:
        with run.meter.phase("evaluation"):
            await run.publish()
            if recall.found:
                run.screen.note(f"{recall.found} answers exist from an earlier start; only missing ones are requested")
            made = await evaluate_policy(
                solver(recall),
                problems,
                protocol,
                fault_budget=run.recipe.run.fault_budget,
                setup=setup,
                progress=run.screen.attempted,
                recall=recall,
            )
            made.write(folder, run.progress.step, run.policy.version)
        recall.forget()
