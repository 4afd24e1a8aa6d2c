"""The swap test (swap.py) on what a person named: which evaluations, whose weights, under which settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocstar.analysis.sources import Source, evaluation_source, find_source
from rocstar.analysis.swap import begun_attempts, swap_test, variants_of
from rocstar.cluster.here import Machines
from rocstar.cluster.start import opened_machines
from rocstar.config.recipe import resolved_from_json
from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.subject import LocalModel
from rocstar.parts.build import as_evaluated
from rocstar.parts.modelfolder import model_facts
from rocstar.record.evaluations import SAMPLES
from rocstar.run.material import task_of
from rocstar.run.tasks import heldout_problems
from rocstar.types import Sampling

LIMITS = ("max_turns", "max_response_tokens", "max_parallel_calls")
"""Limits in an evaluation's setup, as `[rollout]` calls them."""


def swapped(name: str, runs: Path) -> Iterator[dict[str, Any]]:
    """The test on an evaluation, or on all of a run's whose weights are there, by step. Raises ConfigError, DataError,
    Unavailable."""
    source = find_source(name, runs)
    if source.run:
        folders = [source.run.evaluation(one, step) for one, step, _ in source.run.evaluations()]
        there = [evaluation_source(folder, runs) for folder in folders if (folder / SAMPLES).is_file()]
        found = [one for one in there if _complaint(one) is None]
        complaint = None if found else "it has no evaluation that kept its attempts and has its weights"
    else:
        found, complaint = [source], _complaint(source)
    if complaint:
        raise ConfigError(f"--swap cannot go on from {name}: {complaint}")
    for one in found:
        yield _tested(one)


def _complaint(source: Source) -> str | None:
    """Why its attempts cannot be continued; None where they can."""
    if source.result is None:
        return "it is no evaluation; name a run or RUN/EVALUATION"
    setup, recipe = source.result["setup"], _recipe(source)
    if source.model is None:
        return "the weights that made it are not there"
    if "benchmark" in setup["data"]:
        return "a benchmark has rules of its own"
    theirs = setup["template"]["name"], setup["environment"], setup["verifier"], setup["sandbox"]["tools"]
    ours = recipe.rollout.template, recipe.rollout.environment, recipe.evaluate.verifier, recipe.sandbox.tools
    return None if theirs == ours else "its template, environment, verifier or tools are not those of its run"


def _recipe(source: Source) -> Recipe:
    """The settings in force, with the limits of the evaluation."""
    assert source.result is not None
    recipe = as_evaluated(resolved_from_json(source.trainer.resolved)) if source.trainer else Recipe()
    limits = {name: source.result["setup"][name] for name in LIMITS}
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


def _tested(source: Source) -> dict[str, Any]:
    recipe = _recipe(source)
    assert source.model is not None and source.result is not None
    setup = source.result["setup"]
    subject = LocalModel(model=source.model, recipe=recipe, run=source.trainer, step=setup["step"])
    held = heldout_problems(task_of(recipe, recipe)) if source.trainer else []
    begun = begun_attempts(source.files[0], {problem.id: problem for problem in held})
    variants = variants_of(list(begun), subject.conversation(), setup["seed"])
    found = {"evaluation": source.name, "problems": len(variants)}
    if not variants:
        return {**found, "rows": []}
    drawn = {name: setup[name] for name in ("temperature", "top_p", "top_k", "seed")}
    longest = max(len(reply) for one in variants for reply in one.replies.values())
    subject, most = subject.fitted([one.begun.problem for one in variants])

    async def tested(machines: Machines) -> list[dict[str, Any]]:
        positions = min(most + longest, model_facts(subject.model).positions)
        async with subject.opened(positions, machines.sandbox, start_server=machines.start_server) as roller:
            return await swap_test(variants, roller, Sampling(max_new_tokens=1, **drawn))

    with opened_machines(recipe, subject.model.resolve() / "config.json", subject.placement) as machines:
        return {**found, "rows": asyncio.run(tested(machines))}
