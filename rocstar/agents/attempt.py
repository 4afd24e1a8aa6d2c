"""One attempt that an agent makes: its requests to the model and to the run's tools, and what they come to.

An outage that reached the agent makes the attempt a fault of ours, whatever the agent did then; what the agent did
wrong is its own. What it gives up goes on until it is known why: an engine that stands still goes on or is lost, and a
call waited for us where its program had yet to run. How many requests and tokens there may be is what
`rollout.max_turns` and `rollout.max_response_tokens` say."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from rocstar.agents.conversations import Answer, Conversations, Thread
from rocstar.data.sft.format import Chat, FunctionCall, Message, Role
from rocstar.dialogue.template import prompt_of
from rocstar.errors import DataError, EngineUnavailable, RocstarError, Unavailable
from rocstar.protocols import Tool
from rocstar.rollout.collect import Roller
from rocstar.types import Completion, Finish, Problem, Sampling, Stop, ToolCall, Trajectory, Turn, seed_for, spans_of

T = TypeVar("T")
FIRST_LOOK_SECONDS = 1.5  # after it was given up: the fleet has looked at its engines by then, so what they do is new
LOOK_SECONDS = 0.1  # between two looks at whether an engine goes on with what an agent has given up


class AttemptOver(RocstarError):
    """A request came after the attempt had ended, or past its limits."""


class AgentFailed(RocstarError):
    """An agent ended with an error of its own."""


class AgentAttempt:
    """What an agent does at one problem. Its own tools are made here and closed by `close`."""

    def __init__(self, roller: Roller, problem: Problem, sampling: Sampling, name: str) -> None:
        """sampling: of every completion; its seed is the attempt's. name: of the attempt, for engines."""
        self._roller, self._sampling = roller, sampling
        conversation = roller.conversation
        self.problem = replace(problem, answer="", metadata={})
        """What the agent may know of it."""
        self._own = conversation.own_tools()
        self._tools = conversation.by_name(self._own)
        self._opening = conversation.ids(prompt_of(conversation.template, problem, ()))
        self._room = len(self._opening) + roller.limits.max_response_tokens
        """Tokens of a conversation at most."""
        self._said = Conversations(conversation, name)
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._requests = self._calls = 0
        self._own_call = asyncio.Lock()
        self.asking: dict[asyncio.Task[Any], float] = {}
        """What the run is answering, and since when the agent no longer waits for it; inf: it waits."""
        self.ends, self.since = inf, 0.0
        """When its own time is over, later by what the run took to answer it, but for what programs of its calls ran;
        since when the run has been answering it, 0 while it does not."""
        self._resting: Thread | None = None
        """The conversation that engines keep, while no completion is under way."""
        self.stop = Stop.ANSWERED
        self.fault: str | None = None
        self.broken: Exception | None = None
        """A mistake in engine or tool, to be raised."""
        self.over = self.refused = self.is_late = False
        """refused: by a limit of the run, the last request. is_late: it did not end in time."""
        self.in_environment = False
        """Whether an environment that others wrote makes it."""

    async def complete(self, chat: Chat, most: int | None = None, stops: Sequence[str] = ()) -> Answer:
        """The model's answer. most: tokens of it; None: as many as there is room for. stops: it ends before the first
        of these. Raises DataError for a request that can't be obeyed, AttemptOver past the limits, Unavailable."""
        self._refuse_late()
        if self._requests >= (turns := self._roller.limits.max_turns):
            self.stop, self.refused = Stop.MAX_TURNS, True
            raise AttemptOver(f"the attempt has made the {turns} requests that rollout.max_turns allows")
        self._requests += 1
        thread = self._said.place(chat, self._check)
        return await self._held(self._continued(thread, chat, most, stops), thread.request)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Run one of the recipe's tools; what the model would be shown of it. Raises DataError, AttemptOver,
        Unavailable."""
        self._refuse_late()
        found = self._tools.get(tool)
        if found is None:
            raise DataError(f"there is no tool named {tool!r}; the tools are: {', '.join(self._tools) or 'none'}")
        asked = ToolCall(id=f"call_{self._calls}", tool=tool, arguments=arguments, raw="")
        self._calls += 1
        return await self._held(self._called(found, asked))

    def blame(self, error: Exception) -> None:
        """An outage makes the attempt a fault of ours. What is neither an outage nor the agent's own is a mistake in
        engine or tool, which ends the run."""
        if isinstance(error, Unavailable):
            self.fault = self.fault or str(error)
        elif not isinstance(error, DataError | AttemptOver | AgentFailed):
            self.broken = self.broken or error

    async def end(self, seconds: float) -> None:
        """The agent has ended: nothing more is asked, and what it gave up is waited for, hardly longer than so many
        seconds."""
        self.over = True
        if self.asking:
            await asyncio.sleep(LOOK_SECONDS)  # a program's end may be known before that of its connections
        left = [asking for asking, given_up in self.asking.items() if given_up < inf]
        if left and (await asyncio.wait(left, timeout=FIRST_LOOK_SECONDS + seconds))[1]:
            told = f"what the agent gave up neither went on nor ended within rollout.agent_seconds = {seconds:g}"
            self.blame(Unavailable(told))

    async def close(self) -> None:
        """Nothing is asked any more; what is under way is broken off."""
        self.over = True
        for asking in self.asking:
            asking.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        unclosed = await asyncio.gather(*(tool.close() for tool in self._own), return_exceptions=True)
        for thread in self._said.threads:  # what was broken off may have left any of them
            await self._roller.engine.close_session(thread.session)
        for error in unclosed:
            if isinstance(error, Exception):
                self.blame(error)

    def trajectory(self, index: int, stop: Stop | None, why: str | None, seconds: float) -> Trajectory:
        """What it came to, not yet verified. stop, why: how the agent ended, and that in words; None: well."""
        prompt, turns = self._said.turns()
        # Past a limit: it fell over our refusal, or after a cut answer.
        limited = stop is Stop.AGENT_FAILED and self.stop is not Stop.ANSWERED
        ended = self.stop if stop is None or limited else stop
        return Trajectory(
            problem_id=self.problem.id,
            index=index,
            prompt_ids=prompt or self._opening,
            turns=turns,
            stop=ended if self.fault is None else Stop.ENVIRONMENT_FAILED,
            fault=self.fault or (None if limited and self.refused else why),
            seconds=seconds,
            tool_seconds=sum(turn.tool_seconds or 0.0 for turn in turns),
        )

    def _refuse_late(self) -> None:
        if self.over:
            raise AttemptOver("the attempt has ended")

    def _check(self, text: str) -> None:
        """Raises AttemptOver for a text that has no room, before it is encoded: the run stands still meanwhile."""
        if (least := self._roller.codec.least_tokens(text)) > self._room:
            raise self._no_room(f"at least {least}", self._room)

    def _no_room(self, tokens: int | str, room: int) -> AttemptOver:
        self.stop, self.refused = Stop.MAX_TOKENS, True
        return AttemptOver(f"the request has {tokens} tokens; rollout.max_response_tokens leaves room for {room}")

    async def _continued(self, thread: Thread, chat: Chat, most: int | None, stops: Sequence[str]) -> Answer:
        try:
            sent = time.monotonic()
            completion = await self._sampled(thread, self._how(thread.asked, most))
            self._refuse_late()
            return self._answer(thread, chat, completion, stops, time.monotonic() - sent)
        finally:
            thread.asked = ()

    def _how(self, ids: tuple[int, ...], most: int | None) -> Sampling:
        """How these tokens are continued. Raises AttemptOver."""
        room = self._room - len(ids)
        if room <= 0:
            raise self._no_room(len(ids), len(ids) + room)
        again, self._seen[ids] = self._seen[ids], self._seen[ids] + 1
        seed = seed_for(self._sampling.seed, again, *ids)  # the same whatever else is under way
        tokens, stops = min(room, most or room), self._roller.stop_token_ids
        return replace(self._sampling, max_new_tokens=tokens, seed=seed, stop_token_ids=stops)

    def _answer(
        self, thread: Thread, chat: Chat, completion: Completion, stops: Sequence[str], seconds: float
    ) -> Answer:
        """What a completion says, which is kept. seconds: that it took."""
        conversation, ids = self._roller.conversation, thread.asked
        if completion.finish is Finish.ABORTED:
            raise EngineUnavailable("the completion was aborted before the model had ended it")
        if not completion.token_ids:
            raise self._no_room(len(ids), len(ids))
        kept, text = self._before(completion, stops)
        calls = conversation.template.calls.parse(text, self._calls) if chat.tools else []
        if not all(_is_sound(call) for call in calls):
            calls = []  # the agent reads what was written
        self._calls += len(calls)
        message = Message(
            role=Role.ASSISTANT,
            content=conversation.template.calls.strip(text).strip() if calls else text,
            calls=tuple(FunctionCall(name=call.tool, arguments=call.arguments) for call in calls),
        )
        turn = Turn(completion=kept, calls=tuple(calls), engine_seconds=seconds)
        self._said.answered(thread, chat, message, turn)
        cut = kept.finish is Finish.LENGTH
        self.stop, self.refused = Stop.MAX_TOKENS if cut else Stop.ANSWERED, False
        return Answer(message, tuple(calls), cut, len(ids), len(kept.token_ids))

    async def _sampled(self, thread: Thread, sampling: Sampling) -> Completion:
        """Continue a conversation. Engines keep what they have computed of one that waits for its next request, so an
        attempt has one such at most: were it to wait for room while it holds some, all attempts could."""
        engine, rested, self._resting = self._roller.engine, self._resting, None
        if rested not in (None, thread):
            await engine.close_session(rested.session)
        before = engine.load()
        try:
            return await engine.generate(thread.asked, sampling, request_id=thread.request, session_id=thread.session)
        finally:
            now = engine.load()
            if now.lost > before.lost or not (now.capacity_tokens and before.capacity_tokens):
                await self._lost("a request was given up while it waited because an engine was lost")
            if any(each.asked for each in self._said.threads if each is not thread):
                await engine.close_session(thread.session)
            else:
                self._resting = thread

    async def _called(self, tool: Tool, asked: ToolCall) -> str:
        """The agent may give up a program that runs, and not one that its tool has yet to run."""
        async with self._own_call:
            self._refuse_late()
            sent = time.monotonic()
            result = await tool.run(asked, seed=seed_for(self._sampling.seed, asked.id))
        self.ends -= result.run_seconds
        if (task := asyncio.current_task()) and sent < self.asking[task] < time.monotonic() - result.run_seconds:
            self.blame(Unavailable("a tool call was given up before its program ran"))
        self._said.ran(asked, result)
        return self._roller.conversation.feedback(result)

    async def _held(self, work: Coroutine[Any, Any, T], request: str = "") -> T:
        """Wait for work that `close` breaks off. Where the agent gives it up it goes on until it is known why. What it
        raises is blamed. request: its id for engines."""
        asking = asyncio.create_task(work)
        self.since = self.since or time.monotonic()
        self.asking[asking] = inf
        asking.add_done_callback(self._held_no_more)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.cancelled():
                raise AttemptOver("the attempt has ended") from None
            if asking in self.asking and not self.is_late:  # else the run breaks it off
                self.asking[asking] = time.monotonic()
                asyncio.get_running_loop().call_later(FIRST_LOOK_SECONDS, self._look_at, asking, request)
            raise

    def _look_at(self, asking: asyncio.Task[Any], request: str) -> None:
        """Break off a request that was given up, once its engine has shown progress or is lost."""
        if request in self._roller.engine.load().standing:
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_at, asking, request)
        elif request:
            asking.cancel()

    def _held_no_more(self, asking: asyncio.Task[Any]) -> None:
        del self.asking[asking]
        if not self.asking:
            self.ends, self.since = self.ends + time.monotonic() - self.since, 0.0
        error = None if asking.cancelled() else asking.exception()
        if isinstance(error, Exception) and not (asking.cancelling() and isinstance(error, Unavailable)):
            self.blame(error)  # but an outage that `close` brings about

    async def _lost(self, told: str) -> None:
        """What is under way in this task was lost for a time: no fault of an agent that does not wait for it now."""
        try:
            await asyncio.sleep(LOOK_SECONDS)  # by then it is known here that a client has gone
        finally:
            if (task := asyncio.current_task()) and (self.asking[task] < inf or task.cancelling()):
                self.blame(Unavailable(told))

    def _before(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The completion up to the token in which one of the texts ends, and its text before it."""
        codec, ids = self._roller.codec, completion.token_ids
        text = codec.decode(ids).removesuffix(self._roller.conversation.template.stop)
        shown, length = min(((text.find(stop), len(stop)) for stop in stops if stop and stop in text), default=(-1, 0))
        if shown < 0:
            return completion, text
        tokens = bisect_left(range(len(ids)), shown + length, key=lambda n: len(codec.decode(ids[:n])))
        logprobs, spans = completion.logprobs[:tokens], spans_of(completion.versions[:tokens])
        kept = Completion(token_ids=ids[:tokens], logprobs=logprobs, finish=Finish.STOP, version_spans=spans)
        return kept, text[:shown]


def _is_sound(call: ToolCall) -> bool:
    """Whether it can be told in JSON."""
    try:
        return not call.parse_error and bool(json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:  # a number that JSON has not, half of a surrogate pair
        return False
