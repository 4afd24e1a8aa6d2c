"""`rocstar eval`: a model or run against a file of problems. Results are printed by the caller and saved here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rocstar.config import Recipe
from rocstar.data.files import load_problems
from rocstar.evaluation.evaluate import Protocol, evaluate_policy
from rocstar.evaluation.subject import Subject, find_subject, opened
from rocstar.launch import quiet_torch, started_sandbox
from rocstar.learning.policy import load_model
from rocstar.learning.threads import use_threads
from rocstar.screen import Screen
from rocstar.types import Problem


def evaluate(
    *,
    model: str,
    data: str,
    n: int,
    temperature: float,
    max_turns: int | None,
    max_response_tokens: int | None,
    question: str,
    answer: str,
    limit: int | None,
    template: str | None,
    verifier: str | None,
    runs: Path,
    screen: Screen,
) -> dict[str, Any]:
    """Figures of `n` attempts per problem: avg@n, pass@n, maj@n with 95% intervals clustered by problem, lengths and
    tool use. Saved below the run's `evals/<file>/` (a plain model's below `<runs>/evals/`).

    Raises ConfigError, DataError."""
    subject = find_subject(model, runs)
    problems = load_problems(Path(data), question=question, answer=answer, limit=limit)
    changes = {"max_turns": max_turns, "max_response_tokens": max_response_tokens, "template": template}
    recipe = _changed(subject.recipe, changes, verifier)
    quiet_torch(recipe.run.threads)
    folder = _folder(subject, Path(data), runs)
    with started_sandbox(recipe.sandbox) as sandbox:
        screen.stage("eval", f"{len(problems)} problems x {n} attempts")
        result = asyncio.run(_evaluate(subject, recipe, problems, n, temperature, sandbox, folder))
    if result["no_room_share"]:
        screen.note(
            f"{result['no_room_share']:.0%} of the prompts fill all positions of this model and count as wrong; "
            "a model with more positions, or a shorter template, would read them"
        )
    screen.note(f"saved in {folder}")
    return {"model": str(subject.model), "data": data, **_public(result)}


async def _evaluate(
    subject: Subject, recipe: Recipe, problems: list[Problem], n: int, temperature: float, sandbox: Any, folder: Path
) -> dict[str, Any]:
    use_threads(recipe.run.threads)
    protocol = Protocol(attempts=n, temperature=temperature, top_p=recipe.rollout.top_p, top_k=recipe.rollout.top_k)
    model, rows = load_model(subject.model), recipe.rollout.engine_rows
    async with opened(model, subject, recipe, sandbox, problems, rows=rows) as roller:
        return await evaluate_policy(roller, problems, protocol, folder=folder, step=subject.step)


def _changed(recipe: Recipe, changes: dict[str, Any], verifier: str | None) -> Recipe:
    tree = recipe.model_dump()
    tree["rollout"] |= {name: value for name, value in changes.items() if value is not None}
    tree["evaluate"] |= {"verifier": verifier} if verifier else {}
    return Recipe.model_validate(tree)


def _folder(subject: Subject, data: Path, runs: Path) -> Path:
    name = data.name.split(".")[0]
    if subject.run:
        return subject.run.evaluation(name, subject.step)
    return runs / "evals" / subject.model.resolve().name / name


def _public(result: dict[str, Any]) -> dict[str, Any]:
    """What a person asked for: `accuracy` and `greedy` are run-folder names for figures that stand here as avg@n."""
    return {k: v for k, v in result.items() if k not in ("accuracy", "greedy", "transcripts")}
