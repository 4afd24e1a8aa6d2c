"""One attempt at one problem, with tools: parses the model's text, runs its calls, formats the replies.

The limits (turns, tokens, calls per turn) are kept here. A mistake of the model becomes a ToolResult; only a failed
service raises an exception. `OneTurn` is one completion under a plain chat template, without our tools, for the paper's
one-turn benchmarks: it shows the functions of a problem (`metadata["functions"]`), if any, and runs none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rocstar.dialogue.codec import Codec
from rocstar.dialogue.marked_calls import typed
from rocstar.dialogue.segments import Segment, ours
from rocstar.dialogue.template import Template, prompt_of
from rocstar.errors import EngineUnavailable
from rocstar.protocols import AttemptTool, Environment, Reply, Tool, ToolSpec
from rocstar.rollout.together import all_or_none
from rocstar.types import Completion, Finish, Problem, Status, Stop, ToolCall, ToolResult, seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """When an attempt ends."""

    max_turns: int
    """Completions (the paper's T)."""
    max_response_tokens: int
    """Everything after the prompt, tool replies included (as in the release)."""
    max_parallel_calls: int
    """Calls of one turn that are run; each further one is answered with a BAD_CALL (the release drops them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Shared by all attempts: how text becomes tokens, and the tools."""

    codec: Codec
    template: Template
    tools: Sequence[Tool]
    """Stateless tools: one instance of each serves all attempts."""
    feedback: Callable[[ToolResult], str]
    """Turns a tool result into text for the model."""
    own_tools: Callable[[], Sequence[AttemptTool]] = lambda: ()
    """Creates the tools that each attempt has of its own."""

    def ids(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        """The text around completions, as tokens."""
        return tuple(self.codec.encode_segments(segments, self.template.reserved))

    def by_name(self, own: Sequence[AttemptTool]) -> Mapping[str, Tool]:
        """All tools of an attempt, `own` ones included, by every name they can be called by."""
        return {name: tool for tool in (*self.tools, *own) for name in (*tool.spec.aliases, tool.spec.name)}

    def calls(self, completion: Completion, first_id: int, specs: Iterable[ToolSpec] = ()) -> list[ToolCall]:
        """specs: of the tools, whose schemas say of which type a value is that stands as text (in tags)."""
        return typed(self.template.calls, self.codec.decode(completion.token_ids), first_id, specs)

    def after(self, completion: Completion, segments: Sequence[Segment]) -> tuple[int, ...]:
        """The tokens of a reply to a completion."""
        return self.after_tokens(completion.token_ids, self.template.stop, segments)

    def after_tokens(self, written: Sequence[int], stop: str, segments: Sequence[Segment]) -> tuple[int, ...]:
        """The tokens of a reply or a question, after tokens that end with a completion. If their last token is not
        `stop` (but an end-of-sequence token of the model), that marker is inserted first, so that the conversation
        stays well formed."""
        ended = tuple(written[-1:]) == self.ids([ours(stop)])
        return self.ids(segments if ended else (ours(stop), *segments))


class ToolEnvironment:
    """Environment over a Conversation; single use. `seed` fixes the randomness of the programs it runs.

    The attempt's own tools are made here and closed by `close`. Their calls run in the order they were written; those
    of shared tools run at once. No call is tried again here: a tool does that itself where it helps."""

    def __init__(self, problem: Problem, conversation: Conversation, limits: AttemptLimits, seed: int) -> None:
        self._problem = problem
        self._conversation = conversation
        self._limits = limits
        self._seed = seed
        self._own = conversation.own_tools()
        self._tools: tuple[Tool, ...] = (*conversation.tools, *self._own)
        self._named = conversation.by_name(self._own)
        self._turn_of_own = asyncio.Lock()
        self._turns = 0
        self._calls = 0
        self._used_tokens = 0

    def opening(self) -> tuple[int, ...]:
        specs = [tool.spec for tool in self._tools]
        return self._conversation.ids(prompt_of(self._conversation.template, self._problem, specs))

    def budget(self) -> int:
        return self._limits.max_response_tokens - self._used_tokens

    async def reply(self, completion: Completion) -> Reply:
        """Raises Unavailable when a tool could not be run, EngineUnavailable when the completion was aborted: neither
        is the model's mistake."""
        if completion.finish is Finish.ABORTED:
            raise EngineUnavailable("the completion was aborted before the model had ended it")
        self._turns += 1
        self._used_tokens += len(completion.token_ids)
        if completion.finish is not Finish.STOP:
            return Reply(stop=Stop.MAX_TOKENS)
        calls = self._conversation.calls(completion, self._calls, [tool.spec for tool in self._tools])
        if not calls:
            return Reply(stop=Stop.ANSWERED)
        if self._turns >= self._limits.max_turns:
            return Reply(calls=tuple(calls), stop=Stop.MAX_TURNS)
        self._calls += len(calls)
        most = self._limits.max_parallel_calls
        ran = await all_or_none(self._run(call) for call in calls[:most])  # all have ended before `close`
        excess = (_refuse(call, f"only {most} tool calls are run in one turn") for call in calls[most:])
        results = (*ran, *excess)
        texts = [self._conversation.feedback(result) for result in results]
        ids = self._conversation.after(completion, self._conversation.template.reply(texts))
        if self._used_tokens + len(ids) >= self._limits.max_response_tokens:
            return Reply(calls=tuple(calls), results=results, stop=Stop.MAX_TOKENS)
        self._used_tokens += len(ids)
        return Reply(calls=tuple(calls), results=results, reply_ids=ids)

    async def close(self) -> None:
        """May be called twice."""
        await asyncio.gather(*(tool.close() for tool in self._own))

    async def _run(self, call: ToolCall) -> ToolResult:
        if call.parse_error is not None:
            return _refuse(call, call.parse_error)
        tool = self._named.get(call.tool)
        if tool is None:
            names = ", ".join(tool.spec.name for tool in self._tools)
            return _refuse(call, f"there is no tool named {call.tool!r}; the tools are: {names}")
        async with self._turn_of_own if tool in self._own else nullcontext():
            return await tool.run(call, seed=seed_for(self._seed, call.id))


@dataclass
class OneTurn:
    """Environment of one completion; an EnvironmentFactory."""

    problem: Problem
    conversation: Conversation
    limits: AttemptLimits
    seed: int

    def opening(self) -> tuple[int, ...]:
        return self.conversation.ids(prompt_of(self.conversation.template, self.problem, specs_of(self.problem)))

    def budget(self) -> int:
        return self.limits.max_response_tokens

    async def reply(self, completion: Completion) -> Reply:
        """Parse its calls, without answering them. Raises EngineUnavailable when the completion was aborted."""
        if completion.finish is Finish.ABORTED:
            raise EngineUnavailable("the completion was aborted before the model had ended it")
        stop = Stop.ANSWERED if completion.finish is Finish.STOP else Stop.MAX_TOKENS
        return Reply(calls=tuple(self.conversation.calls(completion, 0, specs_of(self.problem))), stop=stop)

    async def close(self) -> None:
        pass


def specs_of(problem: Problem) -> list[ToolSpec]:
    """The functions that the model may call."""
    return [
        ToolSpec(name=one["name"], description=one.get("description", ""), parameters=one["parameters"])
        for one in problem.metadata.get("functions", ())
    ]


EnvironmentFactory = Callable[[Problem, Conversation, AttemptLimits, int], Environment]
"""(problem, conversation, limits, seed) -> the environment of one attempt; `ToolEnvironment` is one."""


def _refuse(call: ToolCall, reason: str) -> ToolResult:
    return ToolResult(call_id=call.id, status=Status.BAD_CALL, stderr=reason)
