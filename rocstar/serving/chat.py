"""`rocstar chat`: questions and answers at a terminal; answers are streamed, tool calls shown with their results. The
conversation continues token by token: no text is encoded again."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from rocstar.errors import ConfigError
from rocstar.evaluation.subject import find_agent, opened_agent
from rocstar.protocols import ToolSpec, end_of_answer
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import ToolEnvironment
from rocstar.serving.agent import Ran, answered, environment_for
from rocstar.serving.requests import refuse_temperature
from rocstar.serving.spec import ChatSpec
from rocstar.support.exits import visible
from rocstar.types import Sampling, Stop, Trajectory

ANSWERS = 4  # of full length that a conversation has room for, unless --context says otherwise
COMMAND = re.compile(r"/\w*")  # people type this to look for help or a way out
PROMPT_TOKENS = 1024  # of room for questions beside the answers
ENDS = {
    Stop.MAX_TOKENS: "no room for more, or a call that was never closed; --max-tokens gives more",
    Stop.MAX_TURNS: "it wanted to call a tool once more than rollout.max_turns allows",
}


def chat(spec: ChatSpec, question: Callable[[], Awaitable[str]]) -> None:
    """Ask the prompt once, or each `question` until one is empty. Raises ConfigError."""
    subject = find_agent(spec.model, spec.runs, spec.settings or (), spec.context)
    rollout = subject.recipe.rollout
    answer = spec.max_tokens or rollout.max_response_tokens
    positions = spec.context or min(subject.holds, ANSWERS * answer + PROMPT_TOKENS)
    if spec.system is not None and rollout.environment is not None:
        raise ConfigError("--system has no place in rollout.environment, which lays out its questions itself")
    refuse_temperature("--temperature", spec.temperature)

    async def talk() -> None:
        async with opened_agent(subject, positions=positions, rows=1) as roller:
            roller = replace(roller, limits=replace(roller.limits, max_response_tokens=answer))
            await questions(_Conversation(roller, subject.specs, positions, spec), spec.prompt, question)

    asyncio.run(talk())


async def questions(talking: _Conversation, prompt: str | None, question: Callable[[], Awaitable[str]]) -> None:
    if prompt is not None:
        await talking.ask(prompt)
        return
    while asked := await question():
        if COMMAND.fullmatch(asked):
            print(f"{visible(asked)} is no question, and there are no commands; an empty line ends", file=sys.stderr)
        else:
            await talking.ask(asked)


class _Conversation:
    """The conversation so far, as tokens."""

    def __init__(self, roller: Roller, specs: Sequence[ToolSpec], positions: int, spec: ChatSpec) -> None:
        self._roller, self._specs, self._positions, self._spec = roller, specs, positions, spec
        self._sampling = Sampling(max_new_tokens=1, temperature=spec.temperature)
        self._last: Trajectory | None = None

    async def ask(self, question: str) -> None:
        """Print an answer. Raises ConfigError for a question that leaves no room for one."""
        ids = self._asked(question)
        room = self._positions - len(ids)
        if room < self._roller.limits.max_response_tokens and self._last is not None:
            print("the conversation is full; this question begins a new one", file=sys.stderr)
            self._last = None
            ids = self._asked(question)
            room = self._positions - len(ids)
        longest = self._roller.limits.max_response_tokens
        if room < longest:
            raise ConfigError(
                f"the question has {len(ids)} tokens and its answer may take {longest}, "
                f"which is more than {self._positions} in all; lower --max-tokens, or raise --context as far as the "
                "model allows"
            )
        reply: dict[str, Any] = {"question": question, "text": "", "calls": []}
        async with aclosing(answered(self._roller, question, ids, self._sampling)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, str):
                    reply["text"] += event
                    self._show(event)
                elif isinstance(event, Ran):
                    reply["calls"].append(event.as_data())
                    self._show(f"\n{event.shown()}")
                else:
                    self._end(reply, event)

    def _show(self, text: str) -> None:
        """Write a piece of an answer as it comes; as JSON all of it is written at its end."""
        if not self._spec.as_json:
            print(visible(text), end="", flush=True)

    def _end(self, reply: dict[str, Any], trajectory: Trajectory) -> None:
        if not self._spec.fresh and trajectory.fault is None:
            self._last = trajectory
        if self._spec.as_json:
            print(json.dumps({**reply, "stop": str(trajectory.stop), "fault": trajectory.fault}), flush=True)
            return
        print()
        if trajectory.fault is not None:
            print(visible(f"no answer: {trajectory.fault}"), file=sys.stderr)
        elif trajectory.stop is not Stop.ANSWERED:
            size, why = trajectory.num_sampled_tokens, ENDS[trajectory.stop]
            print(f"(cut after {size} tokens of its own: {why})", file=sys.stderr)

    def _asked(self, question: str) -> tuple[int, ...]:
        """The conversation with this question at its end."""
        conversation = self._roller.conversation
        if self._last is not None:
            follows, ids = conversation.template.next_question(question), self._last.token_ids
            return (*ids, *conversation.after_tokens(ids, end_of_answer(conversation.template), follows))
        if self._roller.environment is ToolEnvironment:
            return conversation.ids(conversation.template.opening(question, self._specs, self._spec.system))
        return environment_for(self._roller, question, 0).opening()
