"""The interfaces between rooms. Each protocol has one contract suite in tests/contracts, run over every
implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rocstar.errors import VerifierUnavailable
from rocstar.types import (
    Completion,
    Demonstration,
    EngineLoad,
    Group,
    Outcome,
    Problem,
    Resampled,
    Sampling,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Weights,
)

if TYPE_CHECKING:
    import torch

    from rocstar.config.sections import LearningSection


class Task(Protocol):
    """The task of a run: problems to train on, and held-out problems to evaluate on.

    Promise: same settings and seed, same problems in the same order; one id for one question; nothing to train on is
    held out. A Task of the user's own is made as `Name(data, tool_name=..., seed=..., heldout=...)`: `data` is the
    `[data]` section, or a stage's, which has no `test_files`; `heldout` is the most problems to hold out."""

    @property
    def atoms(self) -> tuple[str, ...]:
        """Strings that a tokenizer trained for this task keeps whole."""
        return ()

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        """Problems to train on. `exclude`: ids of the run's held-out problems."""
        ...

    def heldout(self) -> list[Problem]:
        """Asked only of the Task made from the `[data]` section."""
        ...


@runtime_checkable
class DemonstratingTask(Task, Protocol):
    """A Task with demonstrations; an sft stage without `sft.rows_file` needs one."""

    def demonstrations(self, count: int) -> list[Demonstration]:
        """`count` conversations to imitate, or all existing ones; their tool results are the tools' true results."""
        ...


class Engine(Protocol):
    """Something that continues token ids.

    Promise: `generate` returns exactly the tokens it sampled, with their logprobs, or raises EngineUnavailable; never a
    partial result. Cancelling the awaiting task frees the request."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        """Continue `token_ids`. Requests of one `session_id` extend one another, so their cache is reused; one that
        comes while another of its session decodes waits for that one's end. The caller that opens a session closes it.

        Where `token_ids` leave no room for another token the completion is empty, with finish LENGTH."""
        ...

    def load(self) -> EngineLoad: ...

    async def load_weights(self, weights: Weights) -> None:
        """Take new weights; cached prefixes of older ones are dropped. Raises EngineUnavailable.

        In-memory `weights.tensors` are read until this returns and not after."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Forget what is cached for a session, and end its requests: their waiters get a Completion with finish
        ABORTED. Unknown ids are ignored."""
        ...


class ForwardingEngine:
    """An engine that passes everything on to another one. A subclass overrides what it changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        return await self._engine.generate(token_ids, sampling, request_id=request_id, session_id=session_id)

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def load_weights(self, weights: Weights) -> None:
        await self._engine.load_weights(weights)

    async def close_session(self, session_id: str) -> None:
        await self._engine.close_session(session_id)


NewestWeights = Callable[[], Weights | None]
"""Called when the weights are about to be read: an engine may take longer to start than a version is kept. Returns None
before the first are published."""


@runtime_checkable
class RestartableEngine(Engine, Protocol):
    """An engine that can be restarted, such as one in a separate process."""

    async def restart(self, newest: NewestWeights | None) -> None:
        """Stop it and start again with the newest weights; None: with its initial weights. Raises EngineUnavailable."""
        ...

    def whereabouts(self) -> dict[str, str | int]:
        """Where it runs, for people: `pid` on its machine, `url`, and `log`, its output file; existing ones only."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can leave its GPU to a learner."""

    async def sleep(self) -> None:
        """Free its GPU memory, cached prefixes included, until `load_weights`; requests wait for that. An engine that
        can't is ended, so that the memory is freed anyway. Raises EngineUnavailable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as shown to the model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    aliases: tuple[str, ...] = ()
    """Other names the same tool answers to; not shown to the model."""


def tool_schema(spec: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI-style function schema, the form `apply_chat_template(tools=...)` takes."""
    function = {"name": spec.name, "description": spec.description, "parameters": _plain(spec.parameters)}
    return {"type": "function", "function": function}


def _plain(value: Any) -> Any:
    """Mappings and sequences as dict and list, which is all that JSON writers take."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


class Tool(Protocol):
    """Something the model can call.

    Promise: never raises for the model's mistakes; raises Unavailable for service failures."""

    @property
    def spec(self) -> ToolSpec: ...

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Run one call; `seed` fixes the program's own randomness."""
        ...


class AttemptTool(Tool, Protocol):
    """A tool of one attempt, which keeps something between its calls. Its creator must always close it."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply to a completion."""

    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    reply_ids: tuple[int, ...] = ()
    """Empty exactly when `stop` is set."""
    stop: Stop | None = None


class Environment(Protocol):
    """One attempt at one problem; single use; owns limits and parsing."""

    def opening(self) -> tuple[int, ...]:
        """Prompt token ids."""
        ...

    def budget(self) -> int:
        """Tokens that may still be sampled."""
        ...

    async def reply(self, completion: Completion) -> Reply: ...

    async def close(self) -> None:
        """Release the attempt's resources and end its processes."""
        ...


class Verifier(Protocol):
    """Judges attempts by their problems' references.

    Promise: total and bounded in time, and an attempt's Outcome does not depend on the other attempts."""

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """One entry per attempt, in order: a group, a step or a benchmark in one call.

        VerifierUnavailable replaces the Outcome of an attempt on which our workers failed, and is raised if no worker
        is available. Raises ContractBroken for an ENVIRONMENT_FAILED trajectory, which is no evidence about the
        model."""
        ...


class Resampler(Protocol):
    """Chooses which siblings to train on. Pure: same rng state, same choice."""

    def __call__(self, group: Group, rng: random.Random) -> Resampled: ...


class Advantage(Protocol):
    """Computes how much better each attempt of a group is than its siblings.

    Promise: one finite number for each reward, zeros where all are equal, no less for a higher reward; pure, and
    independent of the order of siblings."""

    def __call__(self, rewards_G: Sequence[float], settings: LearningSection, /) -> Sequence[float]:
        """rewards_G: of the kept attempts of one group, at least 2."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """Some tokens that the policy wrote, of any attempts of an update. Each field is [T], its logprobs are nats."""

    logprobs: torch.Tensor
    """Under the weights that are being updated; the only one with a gradient."""
    old_logprobs: torch.Tensor
    """Under the weights at the beginning of the step; equal to `logprobs` in a step's only update."""
    sampled_logprobs: torch.Tensor
    """The engine's, under the weights that wrote the token."""
    advantages: torch.Tensor
    """Equal for all tokens of an attempt."""
    attempts: torch.Tensor
    """int64: which attempt (of an agent, which conversation) a token belongs to, from 0; its tokens are adjacent."""


class PolicyLoss(Protocol):
    """The loss of tokens. Means, importance weights, KL and entropy are the learner's (`learning.*`).

    Promise: pure; a token's loss depends only on its own numbers, because an update's tokens come in chunks; or, for a
    function whose `whole_attempts` is true, on those of its attempt, which then comes in one piece, at the cost of a
    second pass through the head; the gradient raises the probability of tokens with a positive advantage, lowers none
    of those, and is finite."""

    def __call__(self, tokens: PolicyTokens, settings: LearningSection, /) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss of each token [T], whether a bound removed its gradient [T] bool, which `clip_share` counts)."""
        ...


class TextCodec(Protocol):
    """The part of a tokenizer that dialogue and answers need."""

    def encode(self, text: str) -> list[int]:
        """Text with special-token markers to ids; adds nothing of its own."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens kept."""
        ...


class Marked(Protocol):
    """The part of a chat template that a codec needs; one whose answers end otherwise than its calls also has
    `answer_stop`, and one of ours the `markers` that a tokenizer trained for it keeps whole."""

    @property
    def stop(self) -> str:
        """The marker that ends an assistant turn; a single token in every tokenizer used."""
        ...

    @property
    def jinja(self) -> str | None:
        """Jinja source for the `chat_template` of a saved tokenizer; None to keep what the tokenizer came with."""
        ...


def end_of_answer(template: Marked) -> str:
    """The marker that ends a turn without calls: `answer_stop`, where a template has one."""
    return str(getattr(template, "answer_stop", template.stop))
