"""From a recipe to the parts that make and judge attempts (`AttemptParts`), and to the engines that write them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace as with_fields

from rocstar.agents.agent import GatewayAgent, agent_named
from rocstar.answers.grade import Grader
from rocstar.answers.plugin import columns_for, verifier_named
from rocstar.config.places import Engines, TorchEngines, VllmEngines
from rocstar.config.sections import Recipe, StageRolloutSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.template import Template
from rocstar.dialogue.templates import template_for
from rocstar.engines.pages import kv_pages
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.vllm import VllmEngine
from rocstar.engines.vllm_server import StartServer, VllmSettings
from rocstar.errors import ConfigError, DataError, EngineUnavailable, Unavailable
from rocstar.parts.placement import Placement
from rocstar.protocols import Engine, Environment, Reply, RestartableEngine, ToolSpec, Verifier
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import AttemptLimits, Conversation, EnvironmentFactory, ToolEnvironment
from rocstar.rollout.episode import Note, note_nothing
from rocstar.rollout.fleet import Fleet, Tell, whereabouts
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.rollout.together import all_or_none
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.support.plugins import check_call, is_reference, load, own_code
from rocstar.tools.choose import NO_TOOLS, Tools, make_tools
from rocstar.types import Completion, Problem, Sampling, ToolResult

if TYPE_CHECKING:
    from rocstar.engines.torch_engine import TorchEngine

TEMPLATE = ("stop", "reserved", "calls", "jinja", "opening", "reply", "next_question", "chat")
"""What a template has."""


@dataclass(frozen=True)
class AttemptParts:
    """The parts of attempts that a recipe defines: tools, environment, template and limits. All code that makes
    attempts gets them here."""

    recipe: Recipe

    @cached_property
    def program_limits(self) -> Limits:
        """Limits of each program."""
        limits = self.recipe.sandbox
        return Limits(
            wall_seconds=limits.timeout_seconds,
            cpu_seconds=limits.cpu_seconds,
            memory_bytes=limits.memory_bytes,
            output_bytes=limits.output_bytes,
            processes=limits.processes,
        )

    def tools(self, sandbox: SandboxClient | None = None) -> Tools:
        """The model's tools; without a sandbox only for inspection. Raises ConfigError for a tool that does not exist
        or does not fit."""
        sections = self.recipe
        return make_tools(
            sections.sandbox.tools,
            sandbox or SandboxClient(daemons=0),
            self.program_limits,
            tool_name=sections.rollout.tool_name,
            folders=sections.run.modules,
        )

    def check(self) -> None:
        """Raise ConfigError if a tool, the environment or the verifier does not exist or does not fit."""
        self.tools()
        _ = self.environment, self.agent, self.columns

    @cached_property
    def specs(self) -> Sequence[ToolSpec]:
        """The specs of the tools. Raises ConfigError like `tools`."""
        return self.tools().specs

    @property
    def shown_specs(self) -> Sequence[ToolSpec]:
        """The specs that a prompt lists: none where no attempt may call tools."""
        return self.specs if self.recipe.has_tools else ()

    @cached_property
    def columns(self) -> Sequence[str]:
        """Columns of the data that the verifier requires. Raises ConfigError for an unknown verifier."""
        return columns_for(self.recipe.evaluate.verifier, self.recipe.run.modules)

    def refuse_rows(self, problems: Iterable[Problem], *, calls: bool = True, verified: bool = True) -> None:
        """Raises DataError for a row without a column that the verifier requires, and for one with arguments of its own
        for a tool, which none receives (verl's `tools_kwargs`). calls: whether these attempts may call tools; an agent
        or an environment of the user's own reads the row. verified: whether the verifier judges them."""
        own = self.recipe.rollout.agent or self.recipe.rollout.environment
        specs = self.shown_specs if calls and not own else ()
        names = [name for spec in specs for name in (spec.name, *spec.aliases)]
        columns = self.columns if verified else ()
        for problem in problems if names or columns else ():
            if lacking := [name for name in columns if name not in problem.metadata]:
                raise DataError(
                    f"{problem.place} has no column {', '.join(lacking)} beside those of question and answer, which "
                    f"{self.recipe.evaluate.verifier} requires; add it, give the parameter a default, or take "
                    "`question` and `answer` by these names"
                )
            given = _object(_object(problem.metadata.get("extra_info")).get("tools_kwargs"))
            if unread := [name for name in names if _gives(given.get(name))]:
                raise DataError(
                    f"{problem.place} has extra_info.tools_kwargs for {', '.join(unread)}, which no tool receives; "
                    "leave them out, or let a rollout.agent read them (client.row)"
                )

    @cached_property
    def environment(self) -> EnvironmentFactory:
        """Makes the environment of each attempt. Raises ConfigError."""
        reference = self.recipe.rollout.environment
        if reference is None:
            return ToolEnvironment
        found: EnvironmentFactory = load(reference, folders=self.recipe.run.modules, setting="rollout.environment")
        setting = f"rollout.environment = {reference!r}"
        check_call(found, ("problem", "conversation", "limits", "seed"), said=setting)

        def factory(problem: Problem, conversation: Conversation, limits: AttemptLimits, seed: int) -> Environment:
            with own_code(f"{setting} failed", found):
                environment = found(problem, conversation, limits, seed)
            for name in ("opening", "budget", "reply", "close"):
                if not hasattr(environment, name):
                    kind = type(environment).__name__
                    raise ConfigError(f"{setting} made {kind}, which has no {name}; see rocstar.protocols.Environment")
            return _OwnEnvironment(environment, problem)

        return factory

    @cached_property
    def agent(self) -> GatewayAgent | None:
        """Makes the attempts in place of the turn loop. Raises ConfigError."""
        rollout, evaluate = self.recipe.rollout, self.recipe.evaluate
        if rollout.agent is None:
            return None
        return agent_named(rollout.agent, rollout, right_above=evaluate.right_above, folders=self.recipe.run.modules)

    @cached_property
    def feedback(self) -> Callable[[ToolResult], str]:
        """Turns a tool result into text for the model."""
        rollout = self.recipe.rollout
        return partial(
            feedback_text,
            max_chars=rollout.feedback_max_chars,
            truncate=rollout.feedback_truncate,
            errors=rollout.feedback_errors,
        )

    def template(self, model: Path | None) -> Template:
        """The format of conversations. model: folder of the chat template for rollout.template 'model'. Raises
        ConfigError."""
        rollout = self.recipe.rollout
        specs = self.specs if rollout.has_tools or self.recipe.has_tools else ()
        preamble = "" if rollout.agent and rollout.preamble is None else rollout.preamble  # an agent writes its own
        given: dict[str, Any] = {"preamble": preamble, "options": rollout.template_options}
        if not is_reference(rollout.template):
            return template_for(rollout.template, model, specs, **given)
        own = load(rollout.template, folders=self.recipe.run.modules, setting="rollout.template")
        said = f"rollout.template = {rollout.template!r}"
        with own_code(said, own):
            made: Template = own(model, specs, **given)
        if lacks := next((member for member in TEMPLATE if not hasattr(made, member)), None):
            raise ConfigError(f"{said} made no template: {type(made).__name__} has no {lacks}")
        return made

    def conversation(
        self, codec: Codec, template: Template, *, with_tools: bool, sandbox: SandboxClient | None = None
    ) -> Conversation:
        """Shared by all attempts: how text becomes tokens, and the tools. Raises ConfigError."""
        tools = self.tools(sandbox) if with_tools else NO_TOOLS
        return Conversation(
            codec=codec, template=template, tools=tools.shared, feedback=self.feedback, own_tools=tools.own
        )

    def verifier(self, rollout: StageRolloutSection, codec: Codec, template: Template, grader: Grader) -> Verifier:
        """Judges attempts. Raises ConfigError."""
        evaluate = self.recipe.evaluate
        return verifier_named(
            evaluate.verifier,
            codec,
            grader,
            truncated=rollout.truncated,
            calls=template.calls,
            folders=self.recipe.run.modules,
            right_above=evaluate.right_above,
            ends=codec.stop_ids(template),
        )

    def roller(
        self,
        rollout: StageRolloutSection,
        *,
        codec: Codec,
        template: Template,
        engine: Engine,
        sandbox: SandboxClient,
        grader: Grader,
        note: Note = note_nothing,
    ) -> Roller:
        """Makes and judges attempts under the limits of `rollout`. Raises ConfigError."""
        return Roller(
            engine=engine,
            conversation=self.conversation(codec, template, with_tools=rollout.has_tools, sandbox=sandbox),
            verifier=self.verifier(rollout, codec, template, grader),
            limits=attempt_limits(rollout),
            stop_token_ids=codec.stop_ids(template),
            environment=self.environment,
            agent=self.agent,
            note=note,
        )


def _object(value: Any) -> Mapping[str, Any]:
    """An object, perhaps written as JSON, as in a CSV; an empty one for anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    return value if isinstance(value, Mapping) else {}


def _gives(arguments: Any) -> bool:
    """Whether any is given; parquet has all tools' in every row, empty ones as None."""
    return any(map(_gives, arguments.values())) if isinstance(arguments, Mapping) else arguments is not None


def attempt_limits(rollout: StageRolloutSection) -> AttemptLimits:
    return AttemptLimits(
        max_turns=rollout.max_turns,
        max_response_tokens=rollout.max_response_tokens,
        max_parallel_calls=rollout.max_parallel_calls,
    )


def sampling_of(rollout: StageRolloutSection) -> Sampling:
    """The sampling of training attempts; each attempt sets its own token limit and seed."""
    return Sampling(max_new_tokens=1, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)


class _OwnEnvironment:
    """A user's environment. Its exceptions are faults that name it, never a reward."""

    def __init__(self, inner: Environment, problem: Problem) -> None:
        self._inner, self._problem = inner, problem

    def opening(self) -> tuple[int, ...]:
        with own_code("rollout.environment: opening failed", self._inner):
            return self._inner.opening()

    def budget(self) -> int:
        with self._faults("budget"):
            return self._inner.budget()

    async def reply(self, completion: Completion) -> Reply:
        with self._faults("reply"):
            reply = await self._inner.reply(completion)
            if not isinstance(reply, Reply):
                raise TypeError(f"it returned {reply!r:.60}; let it return a rocstar.protocols.Reply")
            return reply

    async def close(self) -> None:
        with self._faults("close"):
            await self._inner.close()

    @contextmanager
    def _faults(self, method: str) -> Iterator[None]:
        place = f"{type(self._inner).__name__}.{method} failed at problem {self._problem.place}"
        try:
            with own_code(f"rollout.environment: {place}", self._inner):
                yield
        except ConfigError as error:
            raise Unavailable(str(error)) from error


OwnedEngine: TypeAlias = "TorchEngine | ProcessEngine | VllmEngine"
"""An engine that is closed by the code that opened it."""


def named_engines(
    entries: Sequence[Engines], settings: EngineSettings, logs: Path, start: StartServer, placement: Placement
) -> dict[str, ProcessEngine | VllmEngine]:
    """Engines of `[[engine]]` by name, each with these settings on its GPUs and with its KV cache, torch engines with
    their share of the threads; none of them runs yet. logs: folder for what servers print. start: starts a vLLM server.
    Raises ConfigError if there is no vLLM, and for a cache that does not hold an attempt."""
    kv_pages(settings.kv_tokens, settings.rows, settings.positions)
    named = [(name, entry) for entry in entries for name in entry.names]
    share = settings.threads // max(1, sum(isinstance(entry, TorchEngines) for _, entry in named))
    settings = with_fields(settings, threads=max(1, share))
    return {name: _engine(name, entry, settings, logs / f"{name}.log", start, placement) for name, entry in named}


def _engine(
    name: str,
    entry: Engines,
    settings: EngineSettings,
    log: Path,
    start: StartServer,
    placement: Placement,
) -> ProcessEngine | VllmEngine:
    if entry.url:
        return VllmEngine(entry.url, vocab_size=settings.vocab_size)
    placed = next(each for each in placement.engines if each.name == name)
    settings = with_fields(settings, gpus=placed.gpus, kv_tokens=placed.kv_tokens or settings.kv_tokens)
    if isinstance(entry, TorchEngines):
        if placed.kv_tokens:
            settings = with_fields(settings, kv_tokens=min(placed.kv_tokens, settings.rows * settings.positions))
        return ProcessEngine(settings)
    server = VllmSettings(
        model=Path(settings.folder),
        python=vllm_python(entry),
        log=log,
        max_tokens=settings.positions,
        rows=settings.rows,
        capacity_tokens=settings.kv_tokens or (None if settings.gpus else settings.rows * settings.positions),
        dtype=settings.dtype,
        device=settings.device,
        threads=entry.threads,
        gpus=settings.gpus,
        tensor_parallel=entry.tensor_parallel,
        memory_share=placement.share(placed),
        sleeps=placement.colocate,
        place=placement.servers.index(placed),
    )
    return VllmEngine(server, vocab_size=settings.vocab_size, start=start)


def vllm_python(entry: VllmEngines) -> Path:
    """Raises ConfigError where there is none."""
    python = entry.python or os.environ.get("ROCSTAR_VLLM_PYTHON")
    if python is None or not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.{entry.name} needs a Python that has vLLM and was given {python or 'none'}; make one with "
            f"scripts/vllm_env, and set ROCSTAR_VLLM_PYTHON or engine.{entry.name}.python to what it prints"
        )
    return Path(python)


async def _begun(name: str, engine: OwnedEngine) -> None:
    """Start an engine if it needs starting; retry once. Raises EngineUnavailable."""
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
    engines: Mapping[str, OwnedEngine], *, vocab_size: int, patience_seconds: float, tell: Tell = lambda *_, **__: None
) -> AsyncIterator[Fleet]:
    """These engines as one, even a single one, so that faults of engines are handled in one place. Starts their
    processes in parallel; everything is closed with the context. patience_seconds: `engine_patience_seconds`. Raises
    EngineUnavailable, ConfigError."""
    try:
        await all_or_none(_begun(name, engine) for name, engine in engines.items())
        fleet = Fleet(engines, KvScheduler(), vocab_size=vocab_size, patience_seconds=patience_seconds, tell=tell)
        for name, engine in engines.items():
            if found := whereabouts(engine):
                tell("engine_started", engine=name, **found)
        try:
            yield fleet
        finally:
            await fleet.close()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
