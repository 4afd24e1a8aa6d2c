"""`rocstar plan`: what a recipe would take on given GPUs, before anyone pays for them. Nothing here loads torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rocstar.cli.verbs.common import AsJson, Settings, print_json

if TYPE_CHECKING:
    from rocstar.config.sections import Recipe, RolloutStage
    from rocstar.forecast.plan import GpuPlan

THRESHOLD_MISSED = 4
ASSUMED = "h200"


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML recipe.")],
    settings: Settings = None,
    gpus: Annotated[int, typer.Option(min=0, help="How many GPUs.")] = 8,
    gpu: Annotated[
        str | None,
        typer.Option(help="h200 (assumed where none is named), 4090, mi300x, ...; or GB:TFLOPS:GB/s of another."),
    ] = None,
    length_share: Annotated[float, typer.Option(min=0.01, max=1, help="Mean length of a response, by its cap.")] = 0.4,
    bandwidth_share: Annotated[float, typer.Option(min=0.01, max=1, help="Of peak bandwidth, in decoding.")] = 0.6,
    learning_share: Annotated[float, typer.Option(min=0.01, max=1, help="Of peak operations, in learning.")] = 0.45,
    tool_calls: Annotated[float, typer.Option(min=0, max=10**6, help="Calls in an attempt.")] = 2.7,
    placement: Annotated[
        bool, typer.Option("--placement", help="Print only which process takes which GPU, and its memory by kind.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print memory, hours, sandbox cores and disk that a recipe would take, and what limits it.

    Ends with 4 where it cannot run on these GPUs. Of a machine without GPUs `rocstar train RECIPE --dry-run` tells the
    memory.

    Example: rocstar plan recipes/paper/stage3.toml --gpus 64 --gpu mi300x"""
    from rocstar.config.recipe import load_recipe
    from rocstar.errors import ConfigError
    from rocstar.forecast.plan import WITHOUT_GPUS, Assumptions, Planner, gpu_named

    if not gpus:
        raise ConfigError(f"--gpus 0 can't be planned for; {WITHOUT_GPUS}")
    if gpu is None:
        gpu = ASSUMED
        print(f"{gpus} {ASSUMED} are planned for; name yours with --gpus and --gpu", file=sys.stderr)
    spec = gpu_named(gpu)
    loaded = load_recipe(recipe, settings or [])
    evaluates = bool(loaded.evaluate.problems or loaded.evaluate.benchmark)
    for line in () if placement else _not_counted(loaded.rollout_stages, evaluates):
        print(line, file=sys.stderr)
    assumed = Assumptions(
        length_share=length_share,
        bandwidth_share=bandwidth_share,
        learning_share=learning_share,
        tool_calls=tool_calls,
    )
    planner = Planner(recipe=loaded, gpu=spec, gpus=gpus)
    made = None if placement else replace(planner, recipe=_within_pools(loaded)).weighed(assumed)
    table = made.placement if made else planner.placement()
    if table.processes and (note := planner.differences()):
        print(note, file=sys.stderr)
    if as_json:
        print_json({**asdict(made), "hours": made.hours, "assumptions": asdict(assumed)} if made else asdict(table))
    elif made:
        _print(made)
    elif table.processes:
        print("\n\n".join((table.table(), *table.notes())))
    for refusal in () if as_json else table.refusals:
        print(f"\ndoes not fit: {refusal}")
    if table.refusals:
        raise typer.Exit(THRESHOLD_MISSED)


def _not_counted(stages: Sequence[RolloutStage], evaluates: bool) -> Iterator[str]:
    """Attempts whose time is in no stage of a plan."""
    for stage in stages:
        if rounds := stage.rollout.refill:
            yield f"{stage.name}: the rounds of rollout.refill {rounds} follow from rewards and are not counted"
        if each := stage.data.drop_solved_attempts:
            yield f"{stage.name}: data.drop_solved_attempts {each}, made at every problem before it, are not counted"
    if evaluates:
        yield "evaluations are not counted"


def _within_pools(recipe: Recipe) -> Recipe:
    """The recipe with no more problems a step than there are; with its own number where they cannot be read yet."""
    from rocstar.config.sections import RolloutStage
    from rocstar.data.sft.check import load_conversations
    from rocstar.errors import ConfigError, DataError
    from rocstar.run.material import few_problems, problems_of, task_of
    from rocstar.run.rows import with_steps
    from rocstar.run.tasks import heldout_problems

    tool, files = recipe.rollout.tool_name, {one.name: one.sft.rows_file for one in recipe.sft_stages if one.epochs}
    try:
        rows = {name: len(load_conversations(Path(file), tool)) for name, file in files.items() if file}
        counted, _ = with_steps(recipe.stage, rows)
        recipe = recipe.model_copy(update={"stage": counted})
    except (ConfigError, DataError) as error:
        print(f"the steps of epochs are not planned: {str(error).rstrip('.')}", file=sys.stderr)
    try:
        heldout = heldout_problems(task_of(recipe, recipe))
        pools = {one.name: len(problems_of(one, task_of(recipe, one), heldout)) for one in recipe.rollout_stages}
    except (ConfigError, DataError) as error:
        unread = str(error).rstrip(".")
        print(f"problems can't be read ({unread}), so rollout.problems_per_step counts as it stands", file=sys.stderr)
        return recipe
    stages = []
    for stage in recipe.stage:
        if isinstance(stage, RolloutStage) and (few := few_problems(stage, pools[stage.name])):
            print(few, file=sys.stderr)
            rollout = stage.rollout.model_copy(update={"problems_per_step": pools[stage.name]})
            stage = stage.model_copy(update={"rollout": rollout})
        stages.append(stage)
    return recipe.model_copy(update={"stage": stages})


def _print(made: GpuPlan) -> None:
    from rocstar.support.screen import plural

    if not made.placement.processes:
        return
    said = f"{plural(made.learners, 'learner')} and {plural(made.engines, 'engine')} on {made.gpu}"
    print(f"{_count(made.parameters)} parameters; {said}; GB on each GPU of a process:\n\n{made.placement.table()}")
    for note in made.placement.notes():
        print(note, file=sys.stderr)
    if made.refusals:
        return
    print(f"\nan engine's KV cache holds {made.sequences:,.0f} attempts of mean length\n")
    print("tokens, seconds and calls are of one step, hours of all")
    print("stage       steps  M tokens  rollout s  learning s    calls  cores    hours")
    for stage in made.stages:
        digits = 1 if stage.hours >= 1 else 3
        print(
            f"{stage.name:10}{stage.steps:7}{stage.tokens / 1e6:10.2f}{stage.rollout_seconds:11.1f}"
            f"{stage.learning_seconds:12.1f}{stage.calls:9,.0f}{stage.cores:7.0f}{stage.hours:9.{digits}f}"
        )
    hours = made.hours
    lasts = f"{hours:,.1f} hours ({hours / 24:.1f} days)" if hours >= 1 else f"{hours * 60:.1f} minutes"
    print(f"\n{lasts}; most of it goes into {made.limit}")
    print(f"disk: up to {made.disk_bytes / 1e9:,.{0 if made.disk_bytes >= 1e10 else 2}f} GB")
    changes = ", ".join(f"{name} {factor - 1:+.0%}" for name, factor in made.matters.items())
    print(f"hours when an assumption is a quarter larger: {changes}")


def _count(number: float) -> str:
    """14.77B, 342.4K."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"
