"""Wiring: from a recipe to the parts that make and judge attempts. Decisions live in the parts; here they only meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace as with_fields

from rocstar.answers.grade import Grader
from rocstar.answers.plugin import verifier_named
from rocstar.config.places import SandboxSection, TorchEngines, VllmEngines
from rocstar.config.sections import Recipe, RlStage, RolloutSection, StageRolloutSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.template import Template
from rocstar.dialogue.templates import template_for
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.vllm import VllmEngine
from rocstar.engines.vllm_server import StartServer, VllmSettings
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.protocols import Engine, RestartableEngine, ToolSpec
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation, EnvironmentFactory, Limits, ToolEnvironment
from rocstar.rollout.episode import Note, note_nothing
from rocstar.rollout.fleet import Fleet, Tell, tell_nobody, whereabouts
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.scheduler import Scheduler
from rocstar.rollout.together import all_or_none
from rocstar.sandbox.call import Limits as ProgramLimits
from rocstar.sandbox.client import SandboxClient
from rocstar.support.plugins import check_call, load
from rocstar.tools.choose import NO_TOOLS, Tools, make_tools
from rocstar.types import ToolResult


def program_limits(limits: SandboxSection) -> ProgramLimits:
    return ProgramLimits(
        wall_seconds=limits.timeout_seconds,
        cpu_seconds=limits.cpu_seconds,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        processes=limits.processes,
    )


def tools_of(recipe: Recipe, sandbox: SandboxClient) -> Tools:
    """What the model may call. Raises ConfigError for a tool that there is not or that does not fit."""
    limits, name = program_limits(recipe.sandbox), recipe.rollout.tool_name
    return make_tools(recipe.sandbox.tools, sandbox, limits, tool_name=name, folders=recipe.run.modules)


def environment_of(recipe: Recipe) -> EnvironmentFactory:
    """Makes the environment of each attempt. Raises ConfigError."""
    reference = recipe.rollout.environment
    if reference is None:
        return ToolEnvironment
    found: EnvironmentFactory = load(reference, folders=recipe.run.modules, setting="rollout.environment")
    arguments = ("problem", "conversation", "limits", "seed")
    check_call(found, arguments, said=f"rollout.environment = {reference!r}")
    return found


def specs_of(recipe: Recipe) -> Sequence[ToolSpec]:
    """What the recipe's tools say of themselves; nothing is run. Raises ConfigError like `tools_of`."""
    return tools_of(recipe, SandboxClient(daemons=0)).specs


def template_of(recipe: Recipe, model: Path | None) -> Template:
    """How conversations are written; `model`: the folder whose own chat template may be meant. Raises ConfigError."""
    used = any(rollout.max_turns > 1 for rollout in (recipe.rollout, *rollouts_of(recipe)))
    specs = specs_of(recipe) if used else ()
    return template_for(recipe.rollout.template, model, specs, preamble=recipe.rollout.preamble)


def rollouts_of(recipe: Recipe) -> list[StageRolloutSection]:
    """Under which limits attempts are made, in training and evaluation."""
    return [stage.rollout for stage in recipe.stage if isinstance(stage, RlStage)] or [recipe.rollout]


def as_evaluated(recipe: Recipe) -> Recipe:
    """With the limits of the last RL stage as the base, under which training evaluates at its end."""
    limits = rollouts_of(recipe)[-1].model_dump()
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


def make_conversation(
    recipe: Recipe, codec: Codec, template: Template, sandbox: SandboxClient, *, with_tools: bool = True
) -> Conversation:
    """What all attempts share: how text becomes tokens, and which tools there are."""
    tools = tools_of(recipe, sandbox) if with_tools else NO_TOOLS
    return Conversation(
        codec=codec,
        template=template,
        tools=tools.shared,
        feedback=make_feedback(recipe.rollout),
        own_tools=tools.own,
    )


def make_feedback(rollout: RolloutSection) -> Callable[[ToolResult], str]:
    """How tool results are worded for the model."""
    return partial(
        feedback_text,
        max_chars=rollout.feedback_max_chars,
        truncate=rollout.feedback_truncate,
        errors=rollout.feedback_errors,
    )


def make_roller(
    recipe: Recipe,
    rollout: StageRolloutSection,
    *,
    codec: Codec,
    template: Template,
    engine: Engine,
    sandbox: SandboxClient,
    grader: Grader,
    note: Note = note_nothing,
) -> Roller:
    """Makes and judges attempts under the limits of `rollout`. With a single turn there is no use for a tool."""
    conversation = make_conversation(recipe, codec, template, sandbox, with_tools=rollout.max_turns > 1)
    return Roller(
        engine=engine,
        conversation=conversation,
        verifier=verifier_named(
            recipe.evaluate.verifier,
            codec,
            grader,
            truncated=rollout.truncated,
            calls=template.calls,
            folders=recipe.run.modules,
            right_above=recipe.evaluate.right_above,
        ),
        limits=Limits(
            max_turns=rollout.max_turns,
            max_response_tokens=rollout.max_response_tokens,
            max_parallel_calls=rollout.max_parallel_calls,
        ),
        stop_token_ids=codec.stop_ids(template),
        environment=environment_of(recipe),
        note=note,
    )


class OwnedEngine(Engine, Protocol):
    """An engine that ends with whoever opened it."""

    async def close(self) -> None: ...


def named_engines(
    recipe: Recipe, settings: EngineSettings, logs: Path, start: StartServer
) -> dict[str, ProcessEngine | VllmEngine]:
    """Those that `[[engine]]` names, by name, each with these settings in a place of its own; none of them runs yet.
    logs: folder for what servers print. start: how a vLLM server is started. Raises ConfigError where there is no
    vLLM."""
    kinds = [(name, entry) for entry in recipe.engine for name in entry.names]
    return {
        name: _engine(entry, with_fields(settings, place=place), logs / f"{name}.log", start)
        for place, (name, entry) in enumerate(kinds)
    }


def _engine(
    entry: TorchEngines | VllmEngines, settings: EngineSettings, log: Path, start: StartServer
) -> ProcessEngine | VllmEngine:
    if isinstance(entry, TorchEngines):
        return ProcessEngine(settings)
    return VllmEngine(entry.url or _vllm_server(entry, settings, log), vocab_size=settings.vocab_size, start=start)


def _vllm_server(entry: VllmEngines, settings: EngineSettings, log: Path) -> VllmSettings:
    return VllmSettings(
        model=Path(settings.folder),
        python=vllm_python(entry),
        log=log,
        max_tokens=settings.positions,
        rows=settings.rows,
        capacity_tokens=settings.kv_tokens or settings.rows * settings.positions,
        dtype=settings.dtype,
        device=settings.device,
        threads=entry.threads,
        environment={"CUDA_VISIBLE_DEVICES": str(settings.place)} if settings.device == "cuda" else None,
    )


def vllm_python(entry: VllmEngines) -> Path:
    """Raises ConfigError where there is none."""
    python = entry.python or os.environ.get("ROCSTAR_VLLM_PYTHON")
    if python is None or not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.{entry.name} needs a Python that has vLLM and was given {python or 'none'}; make one with "
            f"scripts/vllm_env, and set ROCSTAR_VLLM_PYTHON or engine.{entry.name}.python to what it prints"
        )
    return Path(python)


def scheduler_of(recipe: Recipe) -> Scheduler:
    return KvScheduler()


async def _begun(name: str, engine: OwnedEngine) -> None:
    """Start an engine that has to be started; once more where it dies meanwhile. Raises EngineUnavailable."""
    if not isinstance(engine, RestartableEngine):
        return
    with suppress(EngineUnavailable):
        await engine.restart(None)
        return
    try:
        await engine.restart(None)
    except EngineUnavailable as error:
        raise EngineUnavailable(f"engine {name} could not be started: {error}") from error


@asynccontextmanager
async def opened_fleet(
    recipe: Recipe, engines: Mapping[str, OwnedEngine], *, vocab_size: int, tell: Tell = tell_nobody
) -> AsyncIterator[Fleet]:
    """These engines as one, also where there is one alone, so that faults of engines are met in one place. Processes
    are begun, all at once; everything is closed with the context. Raises EngineUnavailable, ConfigError."""
    try:
        await all_or_none(_begun(name, engine) for name, engine in engines.items())
        patience = recipe.rollout.engine_patience_seconds
        scheduler = scheduler_of(recipe)
        fleet = Fleet(engines, scheduler, vocab_size=vocab_size, patience_seconds=patience, tell=tell)
        for name, engine in engines.items():
            if found := whereabouts(engine):
                tell("engine_started", engine=name, **found)
        try:
            yield fleet
        finally:
            await fleet.close()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
