"""`rocstar chat`: one question, one attempt, shown as it was written, tool calls run in the sandbox.

Every question is an attempt of its own; the model does not see earlier ones (it was trained that way)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocstar.config import Recipe
from rocstar.evaluation.evaluate import transcript
from rocstar.evaluation.subject import Subject, find_subject, loaded, opened, positions_of, settings_in_force
from rocstar.learning.threads import use_threads
from rocstar.machines import started_sandbox
from rocstar.rollout.collect import Roller
from rocstar.sandbox.client import SandboxClient
from rocstar.types import Problem, problem_id


def chat(*, model: str, prompt: str | None, settings: Sequence[str], as_json: bool, runs: Path) -> None:
    """Ask `prompt` once, or read questions from standard input until it ends. Raises ConfigError."""
    subject = find_subject(model, runs)
    recipe = settings_in_force(subject.recipe, settings, {})
    positions = positions_of(subject, recipe, [_problem(prompt)] if prompt is not None else [])
    with started_sandbox(recipe.sandbox) as sandbox:
        asyncio.run(_chat(loaded(subject, recipe), subject, recipe, prompt, positions, as_json, sandbox))


async def _chat(
    model: Any,
    subject: Subject,
    recipe: Recipe,
    prompt: str | None,
    positions: int,
    as_json: bool,
    sandbox: SandboxClient,
) -> None:
    """`positions`: tokens of the longest attempt at `prompt`."""
    use_threads(recipe.run.threads)

    async def answer(question: str, positions: int) -> None:
        async with opened(model, subject, recipe, sandbox, positions=positions, rows=1) as roller:
            _print(await _ask(roller, question), as_json)

    if prompt is not None:
        await answer(prompt, positions)
        return
    while question := (await asyncio.to_thread(_read)).strip():
        await answer(question, positions_of(subject, recipe, [_problem(question)]))


def _problem(question: str) -> Problem:
    return Problem(id=problem_id(question), question=question, answer="")


def _read() -> str:
    """One line of standard input; empty at its end."""
    if sys.stdin.isatty():
        print("question (empty line ends)> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


async def _ask(roller: Roller, question: str) -> dict[str, Any]:
    (group,) = await roller.roll([_problem(question)], attempts=1, seed=0, temperature=0.0)
    attempt = group.trajectories[0]
    answer = attempt.outcome.extracted if attempt.outcome else None
    shown = transcript(group, attempt, roller.conversation.codec)
    return {
        "question": question,
        "text": shown["text"],
        "answer": answer,
        "calls": attempt.num_calls,
        "fault": attempt.fault,
    }


def _print(reply: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(reply) if as_json else f"{reply['text']}\n", flush=True)
