"""A model to look at, from what a person typed: a Hugging Face folder, a run's name, `last`, or RUN@STEP."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.answers.grade import Grader
from rocstar.config.places import VllmEngines
from rocstar.config.recipe import changed, resolved_from_json
from rocstar.config.sections import Recipe
from rocstar.dialogue.codec import Codec
from rocstar.engines.process import EngineSettings
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.vllm_server import StartServer, VllmServer
from rocstar.errors import ConfigError
from rocstar.evaluation.setup import as_evaluated
from rocstar.learning.models import compute_dtype, device_of, load_model, name_of_dtype
from rocstar.parts.build import (
    AttemptParts,
    OwnedEngine,
    named_engines,
    opened_fleet,
)
from rocstar.parts.lengths import positions_needed, prompt_tokens
from rocstar.parts.modelfolder import model_facts, model_named
from rocstar.record.folder import RunFolder
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation, EnvironmentFactory
from rocstar.sandbox.client import SandboxClient
from rocstar.types import Problem

READ = ("rollout.", "sandbox.", "model.device", "model.dtype", "evaluate.verifier",
        "evaluate.right_above", "run.threads", "run.seed",
        "run.fault_budget", "run.modules")  # fmt: skip
"""How keys begin that `eval` and `chat` obey."""
INSTEAD = {
    "rollout.temperature": "--temperature",
    "rollout.attempts_per_problem": "--n",
    "rollout.problems_per_step": "--limit",
    "evaluate.attempts": "--n",
    "evaluate.temperature": "--temperature",
    "evaluate.problems": "--limit",
}
"""What says it on the command line of `eval`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    model: Path
    """Hugging Face folder."""
    recipe: Recipe
    """Settings in force: the run's, or defaults with the paper's template."""
    run: RunFolder | None
    """None for a plain model folder."""
    step: int
    """Step of the checkpoint, 0 for a plain model folder."""


def find_subject(name: str, runs: Path) -> Subject:
    """Raises ConfigError when nothing of that name is there."""
    model, run, step = model_named(name, runs)
    recipe = as_evaluated(resolved_from_json(run.resolved)) if run else Recipe()
    return Subject(model=model, recipe=recipe, run=run, step=step)


def settings_in_force(recipe: Recipe, settings: Sequence[str], options: Mapping[str, str]) -> Recipe:
    """A subject's recipe with these changes (`recipe.changed`). Raises ConfigError for a key that an evaluation does
    not read."""
    for key in (text.partition("=")[0].strip() for text in (*settings, *options)):
        if key in INSTEAD or not key.startswith(READ):
            remedy = f"use {INSTEAD[key]}" if key in INSTEAD else f"it reads {', '.join(READ)}"
            raise ConfigError(f"{key} is not read here; {remedy}")
    return changed(recipe, settings, options)


def loaded(subject: Subject, recipe: Recipe) -> Any:
    """The subject's weights where, and in the numbers that, `[model]` says. Raises ConfigError."""
    device = device_of(recipe.model)
    return load_model(subject.model, device=device, dtype=compute_dtype(recipe.model, device))


def conversation_of(subject: Subject, recipe: Recipe) -> Conversation:
    """How attempts talk, found without the model's weights; its tools run nothing. Raises ConfigError for a model
    folder, a template or a tool that will not do."""
    codec, parts = Codec.load(subject.model), AttemptParts(recipe)
    return parts.conversation(codec, parts.template(subject.model), with_tools=recipe.rollout.has_tools)


def fitted(
    subject: Subject,
    recipe: Recipe,
    problems: Sequence[Problem],
    conversation: Conversation,
    environment: EnvironmentFactory,
    *,
    capped: bool,
) -> tuple[Recipe, int]:
    """The recipe and the tokens of its longest attempt, found without the model's weights.

    capped: somebody asked for the cap on tokens; one that nobody asked for is lowered to what the model leaves beside
    the longest prompt. Raises ConfigError where the model holds less than is asked for, or a prompt fills it."""
    holds = model_facts(subject.model, torch_engine=recipe.runs_torch_engines).positions
    cap = recipe.rollout.max_response_tokens
    if not capped:
        longest = max(prompt_tokens(problem, conversation, environment) for problem in problems)
        if (room := min(cap, holds - longest)) > 0:
            rollout = recipe.rollout.model_copy(update={"max_response_tokens": room})
            return recipe.model_copy(update={"rollout": rollout}), longest + room
    return recipe, positions_needed(
        problems, conversation, response_tokens=cap, model_positions=holds, environment=environment
    )


@asynccontextmanager
async def opened(
    model: Any | None,
    subject: Subject,
    recipe: Recipe,
    sandbox: SandboxClient,
    *,
    positions: int,
    rows: int,
    kv_tokens: int | None = None,
    start_server: StartServer = VllmServer.start,
) -> AsyncIterator[Roller]:
    """An engine over `model`, the subject's weights, or where that is None the engines that `[[engine]]` names, which
    load them themselves; ready for attempts of `positions` tokens (`fitted`) under `recipe`, `rows` at once
    over `kv_tokens` tokens of cache (None: what `rows` of them take). Closed with the context. Raises ConfigError where
    there is no memory for so many, EngineUnavailable."""
    codec, parts = Codec.load(subject.model), AttemptParts(recipe)
    template, vocabulary = parts.template(subject.model), codec.vocab_size
    engines: Mapping[str, OwnedEngine]
    if model is None:
        device = device_of(recipe.model)
        settings = EngineSettings(
            folder=str(subject.model.resolve()),
            device=device.type,
            dtype=name_of_dtype(compute_dtype(recipe.model, device)),
            rows=rows,
            positions=positions,
            kv_tokens=kv_tokens,
            vocab_size=vocabulary,
        )
        logs = subject.run.path / "logs" if subject.run else Path(tempfile.gettempdir())
        _refuse_strangers(recipe)
        engines = named_engines(recipe.engine, settings, logs.resolve(), start_server)
    else:
        engines = {
            "embedded": TorchEngine(model, rows=rows, positions=positions, kv_tokens=kv_tokens, vocab_size=vocabulary)
        }
    grader = Grader()
    try:
        patience = recipe.rollout.engine_patience_seconds
        async with opened_fleet(engines, vocab_size=vocabulary, patience_seconds=patience) as fleet:
            yield parts.roller(
                recipe.rollout, codec=codec, template=template, engine=fleet, sandbox=sandbox, grader=grader
            )
    finally:
        await grader.close()


def _refuse_strangers(recipe: Recipe) -> None:
    """A server that runs already has weights of its own, and nothing here tells which."""
    for entry in recipe.engine:
        if isinstance(entry, VllmEngines) and entry.url is not None:
            raise ConfigError(
                f"engine.{entry.name}.url is for training only; leave it out, so that a server is started"
            )
