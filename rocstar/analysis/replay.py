"""The swap test (swap.py) on what a person named: which evaluations, whose weights, under which settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocstar.analysis.sources import Source, evaluation_source, find_source
from rocstar.analysis.swap import begun_attempts, swap_test, variants_of
from rocstar.config import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.setup import as_evaluated
from rocstar.evaluation.subject import Subject, conversation_of, loaded, opened, positions_of
from rocstar.learning.threads import use_threads
from rocstar.machines import Machines, opened_machines
from rocstar.modelfolder import find_model, model_facts
from rocstar.recipe import resolved_from_json
from rocstar.runs.evaluations import SAMPLES
from rocstar.runs.folder import step_of
from rocstar.training.material import task_of
from rocstar.training.tasks import heldout_problems
from rocstar.types import Problem, Sampling

LIMITS = ("max_turns", "max_response_tokens", "max_parallel_calls")
"""Of an evaluation's setup, as they are called in `[rollout]`."""


def swapped(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    """The test on an evaluation, or on all of a run's on its held-out problems whose checkpoints are there, by step.
    Raises ConfigError, DataError, Unavailable."""
    source = find_source(name, runs)
    if source.run is None and source.result is None:
        raise ConfigError(f"--swap goes on from attempts of an evaluation, and {name} is none; name a run or RUN/EVAL")
    found = [source] if source.run is None else [one for one in _evaluations(source) if _complaint(one) is None]
    if not found:
        raise ConfigError(f"run {name} has no evaluation with its attempts and the checkpoint that made them")
    for one in found:
        if complaint := _complaint(one):
            raise ConfigError(f"--swap cannot go on from {one.name}: {complaint}")
        yield _tested(one)


def _evaluations(source: Source) -> Iterator[Source]:
    assert source.run is not None
    for name, step, _ in source.run.evaluations():
        if (source.run.evaluation(name, step) / SAMPLES).is_file():
            yield evaluation_source(source.run.evaluation(name, step))


def _complaint(source: Source) -> str | None:
    """Why an evaluation cannot be gone on with; None where it can."""
    assert source.result is not None
    setup, recipe = source.result.get("setup", {}), _recipe(source)
    if _weights(source) is None:
        return "the weights that made it are not there"
    if "benchmark" in setup["data"]:
        return "a benchmark has rules of its own"
    theirs = setup["template"]["name"], setup["environment"], setup["verifier"], setup["sandbox"]["tools"]
    ours = recipe.rollout.template, recipe.rollout.environment, recipe.evaluate.verifier, recipe.sandbox.tools
    return None if theirs == ours else "its template, environment, verifier or tools are not those of its run"


def _weights(source: Source) -> Path | None:
    """The checkpoint it is of; before a run's first step, the model that the run began with."""
    if source.trainer is None or (source.model and source.trainer.path.resolve() in source.model.resolve().parents):
        return source.model
    began = _recipe(source).model.path if step_of(source.files[0].parent) == 0 else None
    return find_model(began) if began else None


def _recipe(source: Source) -> Recipe:
    """The settings in force, with the limits of the evaluation."""
    recipe = as_evaluated(resolved_from_json(source.trainer.resolved)) if source.trainer else Recipe()
    setup: Mapping[str, Any] = (source.result or {}).get("setup", {})
    limits = {name: setup[name] for name in LIMITS if name in setup}
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


def _tested(source: Source) -> dict[str, Any]:
    model, recipe, setup = _weights(source), _recipe(source), (source.result or {})["setup"]
    assert model is not None
    subject = Subject(model=model, recipe=recipe, run=source.trainer, step=setup.get("step", 0))
    begun = list(begun_attempts(source.files[0], _problems(recipe, source)))
    variants = variants_of(begun, conversation_of(subject, recipe), setup["seed"])
    if not variants:
        raise ConfigError(f"in {source.name} no tool replied in the words of its template, so there is nothing to swap")
    longest = max(len(reply) for one in variants for reply in one.replies.values())
    problems = [one.begun.problem for one in variants]
    positions = min(positions_of(subject, recipe, problems) + longest, model_facts(model).positions)
    sampling = Sampling(
        max_new_tokens=1,
        temperature=setup["temperature"],
        top_p=setup["top_p"],
        top_k=setup["top_k"],
        seed=setup["seed"],
    )

    async def tested(machines: Machines) -> list[dict[str, Any]]:
        use_threads(recipe.run.threads)
        weights = None if recipe.engine else loaded(subject, recipe)
        async with opened(
            weights,
            subject,
            recipe,
            machines.sandbox,
            positions=positions,
            rows=recipe.rollout.engine_rows,
            kv_tokens=recipe.rollout.kv_tokens,
            start_server=machines.start_server,
        ) as roller:
            return await swap_test(variants, roller, sampling)

    with opened_machines(recipe, model.resolve() / "config.json", learns=False) as machines:
        return {"evaluation": source.name, "problems": len(variants), "rows": asyncio.run(tested(machines))}


def _problems(recipe: Recipe, source: Source) -> dict[str, Problem]:
    """The run's held-out problems by id: rows of attempts do not keep what a verifier of one's own may read."""
    held = heldout_problems(task_of(recipe, recipe)) if source.trainer else []
    return {problem.id: problem for problem in held}
