"""The subject of an evaluation or chat, and how it is prepared: local weights of a run or a model folder (LocalModel),
or a model behind a remote endpoint (EndpointModel)."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rocstar.answers.grade import Grader
from rocstar.cluster import started_sandbox
from rocstar.config.places import SandboxSection
from rocstar.config.recipe import changed, refuse_others, resolved_from_json
from rocstar.config.sections import EvaluateSection, Recipe, StageRolloutSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import PAPER, PREAMBLE, SYSTEM, ChatMl
from rocstar.engines.process import EngineSettings
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.torch_forward import lowered
from rocstar.engines.vllm_server import StartServer, VllmServer
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.chat_client import ChatClient
from rocstar.evaluation.endpoint import CodePoints, EndpointSolver, ToolStyle
from rocstar.evaluation.kinds import MATH, BenchmarkKind
from rocstar.learning.models import compute_dtype, device_of, load_model, threads_in_use
from rocstar.parts.build import AttemptParts, OwnedEngine, attempt_limits, named_engines, opened_fleet
from rocstar.parts.lengths import positions_needed, tokens_of_prompts
from rocstar.parts.modelfolder import model_facts, model_name, model_named
from rocstar.parts.placement import EMBEDDED, NOWHERE, Placement, placed_here
from rocstar.parts.threads import begin_threads
from rocstar.protocols import ToolSpec
from rocstar.record.folder import RunFolder
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation, specs_of
from rocstar.sandbox.client import SandboxClient
from rocstar.support.chat_http import check_address
from rocstar.support.weights import state_of
from rocstar.types import Problem

READ = ("rollout.", "sandbox.", "model.device", "model.dtype", "model.fp32_head", "evaluate.verifier",
        "evaluate.right_above", "run.threads", "run.seed",
        "run.fault_budget", "run.modules")  # fmt: skip
"""Prefixes of keys that `eval` and `chat` obey."""
INSTEAD = {
    "rollout.temperature": "--temperature",
    "rollout.attempts_per_problem": "--n",
    "rollout.problems_per_step": "--limit",
    "evaluate.attempts": "--n",
    "evaluate.temperature": "--temperature",
    "evaluate.problems": "--limit",
}
"""The option of `eval` to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """Local weights, of a run's checkpoint or a plain model folder."""

    model: Path
    """Hugging Face folder."""
    recipe: Recipe
    """Settings in force."""
    run: RunFolder | None = None
    step: int = 0
    """Step of the run's checkpoint; 0 without a run."""
    capped: bool = True
    """Whether the user, a benchmark or the run set the token cap."""

    @property
    def name(self) -> str:
        """`setup.model` of the result."""
        return str(self.model.resolve())

    @property
    def folder(self) -> str:
        """Name of the folder of its evaluations, if it has no run."""
        return model_name(self.model)

    @property
    def said(self) -> tuple[str, str]:
        """Descriptions for the user: the text around questions, and which tools run where."""
        return f"template {self.recipe.rollout.template}", tools_in_words(self.recipe.rollout, self.recipe.sandbox)

    @property
    def holds(self) -> int:
        """Tokens of the longest conversation that the model holds."""
        return model_facts(self.model, torch_engine=self.recipe.runs_torch_engines).positions

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools, as shown to the model; none for a single turn."""
        return AttemptParts(self.recipe).specs if self.recipe.rollout.has_tools else ()

    @property
    def version(self) -> int:
        """Optimizer updates behind the weights; 0 where no checkpoint says."""
        with suppress(DataError):
            return int(state_of(self.run.checkpoint(self.step))["policy_version"]) if self.run else 0
        return 0

    @property
    def placement(self) -> Placement:
        """Which engine takes which GPU. Raises ConfigError if they do not fit."""
        return placed_here(self.recipe, self.model, self.holds, learns=False).refuse()

    def conversation(self, kind: BenchmarkKind = MATH) -> Conversation:
        """The conversation of attempts, with tools that run nothing. Raises ConfigError for an unusable model folder,
        template or tool."""
        codec, parts = Codec.load(self.model), AttemptParts(self.recipe)
        conversation = parts.conversation(codec, parts.template(self.model), with_tools=self.recipe.rollout.has_tools)
        return kind.conversation(conversation)

    def engine(self) -> Mapping[str, str]:
        """`setup.engine` of the result."""
        device = device_of(self.recipe.model)
        return {"device": device.type, "dtype": str(compute_dtype(self.recipe.model, device)).removeprefix("torch.")}

    def fitted(self, problems: Sequence[Problem], kind: BenchmarkKind = MATH) -> tuple[LocalModel, int]:
        """The model with a cap on tokens that fits, and the tokens of its longest attempt; found without the weights.
        Only a default cap is lowered. Raises ConfigError if the model holds less than requested, or a prompt fills
        it."""
        parts = AttemptParts(self.recipe)
        environment = kind.environment or parts.environment
        tokens_of = tokens_of_prompts(self.conversation(kind), environment)
        holds, rollout = self.holds, self.recipe.rollout
        kind.refuse_rows(problems, parts)
        if not self.capped:
            where = max(problems, key=tokens_of)
            longest = tokens_of(where)
            if longest >= holds:
                raise ConfigError(
                    f"the longest prompt, {longest} tokens ({where.place}), fills the {holds} positions of the model; "
                    f"take a template that writes less around it than {rollout.template!r} (--template), leave such "
                    "problems out, or take a model that holds more"
                )
            room = min(rollout.max_response_tokens, holds - longest)
            rollout = rollout.model_copy(update={"max_response_tokens": room})
            return replace(self, recipe=self.recipe.model_copy(update={"rollout": rollout})), longest + room
        return self, positions_needed(
            problems, tokens_of, response_tokens=rollout.max_response_tokens, model_positions=holds
        )

    @asynccontextmanager
    async def opened(
        self,
        positions: int,
        sandbox: SandboxClient,
        *,
        rows: int | None = None,
        attempts: int | None = None,
        start_server: StartServer = VllmServer.start,
    ) -> AsyncIterator[Roller]:
        """Load the weights, and make attempts of at most `positions` tokens, until the context ends.

        attempts: their total number, if known; no engine reserves room for more at once. rows: the number at once on
        one engine in this process. None: on the engines of `[[engine]]`, which load the weights themselves, or on one
        in this process, with the rows and the cache of `[rollout]`. Raises ConfigError if memory is insufficient,
        EngineUnavailable."""
        begin_threads(self.recipe, self.model)
        rollout = self.recipe.rollout
        codec, parts = Codec.load(self.model), AttemptParts(self.recipe)
        template, vocabulary = parts.template(self.model), codec.vocab_size
        if rows is None:
            rows_held = rollout.engine_rows if attempts is None else min(rollout.engine_rows, attempts)
            engines = self._engines(positions, rows_held, rollout.kv_tokens, vocabulary, start_server)
        else:
            engines = self._embedded(positions, rows, None, vocabulary)
        grader = Grader()
        try:
            patience = rollout.engine_patience_seconds
            async with opened_fleet(engines, vocab_size=vocabulary, patience_seconds=patience) as fleet:
                yield parts.roller(
                    rollout, codec=codec, template=template, engine=fleet, sandbox=sandbox, grader=grader
                )
        finally:
            await grader.close()

    def _embedded(self, positions: int, rows: int, kv_tokens: int | None, vocabulary: int) -> Mapping[str, OwnedEngine]:
        device = device_of(self.recipe.model)
        dtype, fp32_head = compute_dtype(self.recipe.model, device), self.recipe.model.fp32_head
        given = {} if fp32_head else {"dtype": dtype}
        model = lowered(load_model(self.model, device=device, **given), dtype, fp32_head=fp32_head)
        engine = TorchEngine(model, rows=rows, positions=positions, kv_tokens=kv_tokens, vocab_size=vocabulary)
        return {EMBEDDED: engine}

    def _engines(
        self, positions: int, rows: int, kv_tokens: int | None, vocabulary: int, start_server: StartServer
    ) -> Mapping[str, OwnedEngine]:
        placement = self.placement
        if not self.recipe.engine:
            if room := placement[EMBEDDED].kv_tokens:
                kv_tokens = min(room, rows * positions)  # no more than this evaluation can use
            return self._embedded(positions, rows, kv_tokens, vocabulary)
        for entry in self.recipe.engine:
            if entry.url is not None:  # its weights are unknown
                raise ConfigError(
                    f"engine.{entry.name}.url is for training only; leave it out, so that a server is started"
                )
        settings = EngineSettings(
            folder=self.name,
            device=self.engine()["device"],
            dtype=self.engine()["dtype"],
            rows=rows,
            positions=positions,
            kv_tokens=kv_tokens,
            vocab_size=vocabulary,
            threads=threads_in_use(),
        )
        logs = self.run.path / "logs" if self.run else Path(tempfile.gettempdir())
        return named_engines(self.recipe.engine, settings, logs.resolve(), start_server, placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModel:
    """A model behind an OpenAI-compatible endpoint."""

    url: str
    name: str
    """The model's name at the endpoint."""
    key: str | None
    """Sent as a bearer token; in no result."""
    parallel: int
    """Attempts at once."""
    tools: ToolStyle
    recipe: Recipe
    capped: bool
    """Whether the user or a benchmark set the token cap."""
    system: str | None = SYSTEM
    """System message; None for none."""
    run: None = None
    step: int = 0
    version: int = 0
    placement: Placement = NOWHERE

    @property
    def folder(self) -> str:
        return self.name

    @property
    def said(self) -> tuple[str, str]:
        usual = {None: "no system message", SYSTEM: "the paper's system message"}
        preamble = self._template().preamble
        before = f"before the question {preamble[:40]!r}" if preamble else "the question alone"
        rollout, sandbox = self.recipe.rollout, self.recipe.sandbox
        tools = "tools of the endpoint" if self.tools == "none" else tools_in_words(rollout, sandbox)
        return f"{usual.get(self.system, 'its own system message')}, {before}", tools

    def conversation(self, kind: BenchmarkKind) -> Conversation:
        with_tools = self.recipe.rollout.has_tools
        conversation = AttemptParts(self.recipe).conversation(CodePoints(), self._template(), with_tools=with_tools)
        return kind.conversation(conversation)

    def engine(self) -> Mapping[str, str]:
        return {"endpoint": self.url, "tools": self.tools}

    def fitted(self, problems: Sequence[Problem], kind: BenchmarkKind) -> tuple[EndpointModel, int]:
        """The same model and 0: the endpoint's context length is unknown. Raises ConfigError for errors that show
        before the first request."""
        check_address(self.url)
        self.conversation(kind)
        kind.refuse_rows(problems, AttemptParts(self.recipe))
        if self.tools == "none" and any(map(specs_of, problems)):
            raise ConfigError("these problems bring functions that a model may call, which --tools none does not send")
        return self, 0

    @asynccontextmanager
    async def opened(
        self,
        positions: int,
        sandbox: SandboxClient,
        *,
        attempts: int | None = None,
        start_server: StartServer = VllmServer.start,
    ) -> AsyncIterator[EndpointSolver]:
        """Make attempts until the context ends. Only the sandbox is local."""
        client = ChatClient(self.url, self.name, key=self.key, parallel=self.parallel)
        codec, grader, template = CodePoints(), Grader(), self._template()
        parts, rollout = AttemptParts(self.recipe), self.recipe.rollout
        try:
            yield EndpointSolver(
                client=client,
                conversation=parts.conversation(codec, template, with_tools=rollout.has_tools, sandbox=sandbox),
                verifier=parts.verifier(rollout, codec, template, grader),
                limits=attempt_limits(rollout),
                tools=self.tools,
                words=template,
                environment=parts.environment,
                capped=self.capped,
            )
        finally:
            await grader.close()
            await client.close()

    def _template(self) -> ChatMl:
        """The template for the text around a question."""
        preamble = self.recipe.rollout.preamble
        return replace(PAPER, system=self.system, preamble=PREAMBLE if preamble is None else preamble)


Subject = LocalModel | EndpointModel
"""A subject of an evaluation."""


def find_subject(name: str, runs: Path, settings: Sequence[str], options: Mapping[str, str], gold: str) -> LocalModel:
    """A Hugging Face folder, a run's name, `last` or RUN@STEP, with the run's settings or the defaults, and these
    changes. gold: column of references in the rows to ask; "": none. Raises ConfigError if nothing has that name."""
    model, run, step = model_named(name, runs)
    recipe = resolved_from_json(run.resolved).as_evaluated() if run else Recipe()
    refuse_unread(settings, options)
    data = [("", recipe.data), *((f"stage.{stage.name}.", stage.data) for stage in recipe.rollout_stages)]
    asked = [f"{of}data.columns.answer={gold}" for of, one in data if one.source == "files"]
    return LocalModel(model=model, recipe=changed(recipe, [*asked, *settings], options), run=run, step=step)


def find_agent(name: str, runs: Path, settings: Sequence[str], context: int | None) -> LocalModel:
    """A model to talk to, checked before anything is loaded. context: tokens of the longest conversation; None: what
    the model holds. Raises ConfigError for a model, a setting or a context that cannot be used."""
    subject = find_subject(name, runs, settings, {}, "answer")
    if context is not None and context > subject.holds:
        raise ConfigError(f"--context {context} is more than the {subject.holds} tokens that the model holds; lower it")
    subject.conversation()
    # Nobody judges a conversation, so a reward function of the run's may be gone.
    return replace(subject, recipe=subject.recipe.model_copy(update={"evaluate": EvaluateSection()}))


@asynccontextmanager
async def opened_agent(subject: LocalModel, *, positions: int, rows: int) -> AsyncIterator[Roller]:
    """Engine and sandbox for `rows` conversations at once, of `positions` tokens each. Raises what opening raises."""
    recipe = subject.recipe
    with started_sandbox(recipe.sandbox, calls=recipe.calls_tools) as sandbox:
        async with subject.opened(positions, sandbox, rows=rows) as roller:
            yield roller


def refuse_unread(settings: Sequence[str], options: Mapping[str, str]) -> None:
    """Raises ConfigError for a key that an evaluation does not read."""
    refuse_others((*settings, *options), READ, "it", INSTEAD)


def tools_in_words(rollout: StageRolloutSection, sandbox: SandboxSection) -> str:
    return f"tools {', '.join(sandbox.tools)}" if rollout.has_tools else "no tools"
