"""Whom an evaluation asks: weights that rocstar runs itself (a run, a model folder), or somebody else's endpoint.

Each gives its settings, a place for results, and, opened, a Solver. A benchmark of one turn (`one_turn.py`) talks under
the plain chat template, and a benchmark with a Scorer is judged by that; both hold for either kind of subject."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rocstar.answers.grade import Grader
from rocstar.cluster.here import Machines
from rocstar.config.sections import Recipe
from rocstar.dialogue.markup import PREAMBLE, SYSTEM
from rocstar.dialogue.template import PAPER, ChatMl
from rocstar.engines.scripted import ScriptedEngine
from rocstar.errors import ConfigError
from rocstar.evaluation.attempts import Solver
from rocstar.evaluation.chat_client import ChatClient, check_address
from rocstar.evaluation.contamination import note_of
from rocstar.evaluation.endpoint import CodePoints, EndpointSolver, ToolStyle
from rocstar.evaluation.kinds import BenchmarkKind, environment_for, plain_chat
from rocstar.evaluation.one_turn import specs_of
from rocstar.evaluation.recall import Recall
from rocstar.evaluation.scoring import Judge, Parts, Scorer
from rocstar.evaluation.subject import Subject, conversation_of, fitted, loaded, opened
from rocstar.learning.models import compute_dtype, device_of, name_of_dtype
from rocstar.learning.threads import use_threads
from rocstar.parts.build import AttemptParts
from rocstar.parts.modelfolder import model_name
from rocstar.record.evaluations import model_folder
from rocstar.record.folder import numbered
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation
from rocstar.types import EngineLoad, Problem

EngineLoader = Callable[[], EngineLoad]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """What judges the attempts of a benchmark that brings a Scorer."""

    kind: BenchmarkKind | None
    recall: Recall
    judge: Judge | None = None

    def scorer(self, codec: Any, calls: Any) -> Scorer | None:
        """None: the verifier in force."""
        if self.kind is None or self.kind.scorer is None:
            return None
        return self.kind.scorer(Parts(codec=codec, calls=calls, recall=self.recall, judge=self.judge))

    def roller(self, roller: Roller, recipe: Recipe) -> Roller:
        """The same engines, sandbox and limits, for attempts of this kind."""
        conversation = plain_chat(roller.conversation, self.kind)
        verifier = self.scorer(roller.codec, conversation.template.calls) or roller.verifier
        environment = environment_for(recipe, self.kind)
        return replace(roller, conversation=conversation, environment=environment, verifier=verifier)


class Asked(Protocol):
    """A subject with its settings."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def name(self) -> str:
        """As `setup.model` says it."""
        ...

    @property
    def step(self) -> int:
        """Of a run's checkpoint; 0 where there is no run."""
        ...

    @property
    def known(self) -> tuple[str, ...]:
        """Keys of the setup that the place of the result says already."""
        ...

    @property
    def runs(self) -> Path:
        """The folder of runs."""
        ...

    @property
    def proof(self) -> Path:
        """A file that other machines must see too (`opened_machines`)."""
        ...

    @property
    def said(self) -> tuple[str, str]:
        """What stands around questions, and who runs which tools, in words for a person."""
        ...

    def conversation(self, kind: BenchmarkKind | None) -> Conversation:
        """How attempts talk; its tools run nothing. Raises ConfigError for what will not do."""
        ...

    def engine(self) -> Mapping[str, str]:
        """What computes, for the setup."""
        ...

    def fitted(self, problems: Sequence[Problem], kind: BenchmarkKind | None) -> tuple[Asked, int]:
        """Itself, its cap lowered where nobody asked for one and the model holds less, and tokens of the longest
        attempt, 0 where that is not known here. Raises ConfigError for whatever can be known to fail before anything
        starts."""
        ...

    def places(self, stem: str) -> Iterator[Path]:
        """Folders for an evaluation of that name, the best first."""
        ...

    def contamination(self, problems: Sequence[Problem], name: str) -> Mapping[str, Any] | None:
        """Which of them it has trained on; None where nobody here knows."""
        ...

    def opened(
        self, positions: int, machines: Machines, judging: Judging
    ) -> AbstractAsyncContextManager[tuple[Solver, EngineLoader | None]]:
        """Ready to make attempts of so many tokens; with it, what tells how engines of ours do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedWeights:
    """A run or a model folder."""

    subject: Subject
    recipe: Recipe
    runs: Path
    """Keeps results of model folders, in `evals`."""
    capped: bool = True
    """Somebody asked for the cap on tokens: a person, a benchmark or a run's own recipe."""

    @property
    def name(self) -> str:
        return str(self.subject.model.resolve())

    @property
    def step(self) -> int:
        return self.subject.step

    @property
    def known(self) -> tuple[str, ...]:
        return ("model", "step") if self.subject.run else ()

    @property
    def proof(self) -> Path:
        return self.subject.model.resolve() / "config.json"

    @property
    def said(self) -> tuple[str, str]:
        return f"template {self.recipe.rollout.template}", _tools_here(self.recipe)

    def conversation(self, kind: BenchmarkKind | None) -> Conversation:
        return plain_chat(conversation_of(self.subject, self.recipe), kind)

    def engine(self) -> Mapping[str, str]:
        device = device_of(self.recipe.model)
        return {"device": device.type, "dtype": name_of_dtype(compute_dtype(self.recipe.model, device))}

    def fitted(self, problems: Sequence[Problem], kind: BenchmarkKind | None) -> tuple[AskedWeights, int]:
        talk, environment = self.conversation(kind), environment_for(self.recipe, kind)
        recipe, positions = fitted(self.subject, self.recipe, problems, talk, environment, capped=self.capped)
        return replace(self, recipe=recipe), positions

    def places(self, stem: str) -> Iterator[Path]:
        for part in numbered(stem):
            if self.subject.run:
                yield self.subject.run.evaluation(part, self.subject.step)
            else:
                yield model_folder(self.runs, model_name(self.subject.model)) / part

    def contamination(self, problems: Sequence[Problem], name: str) -> Mapping[str, Any] | None:
        return note_of(self.subject.run, self.subject.step, (problem.question for problem in problems), name)

    @asynccontextmanager
    async def opened(
        self, positions: int, machines: Machines, judging: Judging
    ) -> AsyncIterator[tuple[Solver, EngineLoader | None]]:
        recipe = self.recipe
        use_threads(recipe.run.threads)
        model = None if recipe.engine else loaded(self.subject, recipe)
        rows, tokens = recipe.rollout.engine_rows, recipe.rollout.kv_tokens
        async with opened(
            model,
            self.subject,
            recipe,
            machines.sandbox,
            positions=positions,
            rows=rows,
            kv_tokens=tokens,
            start_server=machines.start_server,
        ) as roller:
            yield judging.roller(roller, recipe), roller.engine.load


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedEndpoint:
    """A model behind an OpenAI-compatible endpoint."""

    url: str
    model: str
    """As the endpoint calls it."""
    key: str | None
    """Sent as a bearer token; in no result."""
    parallel: int
    """Requests at once."""
    tools: ToolStyle
    recipe: Recipe
    runs: Path
    capped: bool
    """As of AskedWeights."""
    system: str | None = SYSTEM
    """System message; None for none."""
    step: int = 0
    known: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.model

    @property
    def proof(self) -> Path:
        return self.runs

    @property
    def said(self) -> tuple[str, str]:
        system = {None: "no system message", SYSTEM: "the paper's system message"}.get(
            self.system, "its own system message"
        )
        preamble = self._template().preamble
        before = f"before the question {preamble[:40]!r}" if preamble else "the question alone"
        return f"{system}, {before}", "tools of the endpoint" if self.tools == "none" else _tools_here(self.recipe)

    def conversation(self, kind: BenchmarkKind | None) -> Conversation:
        with_tools = self.recipe.rollout.has_tools
        made = AttemptParts(self.recipe).conversation(CodePoints(), self._template(), with_tools=with_tools)
        return plain_chat(made, kind)

    def engine(self) -> Mapping[str, str]:
        return {"endpoint": self.url, "tools": self.tools}

    def fitted(self, problems: Sequence[Problem], kind: BenchmarkKind | None) -> tuple[AskedEndpoint, int]:
        """What the endpoint takes is known when it is asked."""
        check_address(self.url)
        self.conversation(kind)
        if self.tools == "none" and any(map(specs_of, problems)):
            raise ConfigError("these problems bring functions that a model may call, which --tools none does not send")
        return self, 0

    def places(self, stem: str) -> Iterator[Path]:
        yield from (model_folder(self.runs, self.model) / part for part in numbered(stem))

    def contamination(self, problems: Sequence[Problem], name: str) -> None:
        return None

    @asynccontextmanager
    async def opened(
        self, positions: int, machines: Machines, judging: Judging
    ) -> AsyncIterator[tuple[Solver, EngineLoader | None]]:
        client = ChatClient(self.url, self.model, key=self.key, parallel=self.parallel)
        codec, grader, template = CodePoints(), Grader(), self._template()
        try:
            parts = AttemptParts(self.recipe).roller(
                self.recipe.rollout,
                codec=codec,
                template=template,
                engine=ScriptedEngine(codec, ()),  # it is the endpoint that writes
                sandbox=machines.sandbox,
                grader=grader,
            )
            parts = judging.roller(parts, self.recipe)
            yield (
                EndpointSolver(
                    client=client,
                    conversation=parts.conversation,
                    verifier=parts.verifier,
                    limits=parts.limits,
                    tools=self.tools,
                    system=template.system,
                    preamble=template.preamble,
                    environment=parts.environment,
                    capped=self.capped,
                ),
                None,
            )
        finally:
            await grader.close()
            await client.close()

    def _template(self) -> ChatMl:
        """The words that are sent around a question."""
        preamble = self.recipe.rollout.preamble
        return replace(PAPER, system=self.system, preamble=PREAMBLE if preamble is None else preamble)


def _tools_here(recipe: Recipe) -> str:
    return f"tools {', '.join(recipe.sandbox.tools)}" if recipe.rollout.has_tools else "no tools"
