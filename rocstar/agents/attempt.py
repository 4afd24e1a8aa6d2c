"""One attempt of an agent: its requests to the model and to the run's tools, and the resulting trajectory.

An outage that reached the agent makes the attempt ENVIRONMENT_FAILED, whatever the agent did then; the agent's own
errors count as its own. A request that it gives up continues until the reason is known: a stalled engine recovers or is
lost, and a call whose program had not started was delayed by us. `rollout.max_turns` and `rollout.max_response_tokens`
limit requests and tokens.

Each request repeats the whole history, as a list of messages. The part up to an earlier answer is matched to the tokens
of that answer, never to its text, so the learner gets exactly the sampled tokens:

    request 1   U                      -> tokens  [U] A
    request 2   U A T                  continues  [U] A [T] B           one conversation, A and B learnt from once each
    request 3   U A T'   (a retry)     begins     [U A T'] C            a second one: U A T' are its prompt
    request 4   S        (a summary)   begins     [S] D                 a third

An answer that the agent sends back changed (thoughts dropped, calls rewritten) matches nothing: the request is rendered
from its messages, as a new conversation. Source: ours."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from rocstar.agents.wire import Answer
from rocstar.data.sft.format import HALF_PAIR, Chat, Message, Refusal, Refused, Role
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.marked_calls import typed
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import prompt_of
from rocstar.errors import DataError, EngineUnavailable, RocstarError, Unavailable
from rocstar.protocols import Tool, ToolSpec, end_of_answer, tool_schema
from rocstar.rollout.environment import Conversation
from rocstar.rollout.fleet import LATE_SECONDS
from rocstar.types import Completion, Finish, Problem, Sampling, Stop, ToolCall, ToolResult, Trajectory, Turn, seed_for

if TYPE_CHECKING:
    from rocstar.rollout.collect import Roller

T = TypeVar("T")
FIRST_LOOK_SECONDS = LATE_SECONDS  # after a request was given up: the fleet has looked since, or knows it is late
MOST_CALLS = 1000  # of the run's tools: it keeps the results of all, and an agent's clock stands while one is made
LOOK_SECONDS = 0.1  # between two checks for progress on a request that an agent has given up


class AttemptOver(RocstarError):
    """A request came after the attempt had ended, or past its limits."""


class AgentFailed(RocstarError):
    """An agent ended with an error of its own."""


class AgentAttempt:
    """An agent's attempt at one problem. Its own tools are created here and closed by `close`."""

    def __init__(self, roller: Roller, problem: Problem, sampling: Sampling, name: str) -> None:
        """sampling: of every completion; its seed is the attempt's. name: of the attempt, for engines."""
        self._engine, self._conversation, self._limits = roller.engine, roller.conversation, roller.limits
        self._sampling = sampling
        self.problem = replace(problem, answer="", metadata={}, messages=tuple(map(dict, problem.messages)))
        """The problem's fields that the agent gets; its messages are copies, which it may change."""
        self._own = roller.conversation.own_tools()
        self._tools = roller.conversation.by_name(self._own)
        self._opening = roller.conversation.ids(prompt_of(roller.conversation.template, problem, ()))
        self._room = len(self._opening) + roller.limits.max_response_tokens  # the most tokens of a conversation
        self._said = Conversations(roller.conversation, name)
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._requests = self._calls = self._runs = 0
        self._own_call = asyncio.Lock()
        self.reading = asyncio.Lock()
        """Bodies are read one at a time: the run keeps them in its memory until they are complete."""
        self.asking: dict[asyncio.Task[Any], float] = {}
        """Requests that the run is answering, and since when the agent no longer waits for each; inf: it waits."""
        self.ends, self.since = inf, 0.0
        """The agent's deadline, extended by the time the run takes to answer it, except run time of its calls'
        programs; since when the run has been answering it, 0 while it does not."""
        self._resting: Thread | None = None  # the conversation cached by engines while no completion is under way
        self.stop = Stop.ANSWERED
        self.fault: str | None = None
        self.broken: Exception | None = None  # A bug in engine or tool, to be raised
        self.over = self.refused = self.is_late = False
        """refused: a limit of the run refused the last request. is_late: the agent did not end in time."""
        self.in_environment = False
        """Whether a foreign environment makes the attempt."""

    async def complete(self, chat: Chat, most: int | None = None, stops: Sequence[str] = ()) -> Answer:
        """The model's answer. most: its limit of tokens; None: all the room. stops: it ends before the first of these
        texts. Raises DataError for a request that can't be obeyed, AttemptOver past the limits, Unavailable."""
        self._refuse_late()
        if self._requests >= (turns := self._limits.max_turns):
            self.stop, self.refused = Stop.MAX_TURNS, True
            raise AttemptOver(f"the attempt has made the {turns} requests that rollout.max_turns allows")
        self._requests += 1
        thread = self._said.place(chat, self._check)
        return await self._held(self._continued(thread, chat, most, stops), thread.request)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Run one of the recipe's tools; returns the text that the model would see. Raises DataError, AttemptOver,
        Unavailable."""
        self._refuse_late()
        found = self._tools.get(tool)
        if found is None:
            raise DataError(f"there is no tool named {tool!r}; the tools are: {', '.join(self._tools) or 'none'}")
        if self._runs >= MOST_CALLS:
            self.stop, self.refused = Stop.MAX_TURNS, True
            raise AttemptOver(f"the attempt has made the {MOST_CALLS} calls that it may make")
        self._runs += 1
        tool_call = ToolCall(id=f"call_{self._calls}", tool=tool, arguments=arguments, raw="")
        self._calls += 1
        return await self._held(self._called(found, tool_call))

    def blame(self, error: Exception) -> None:
        """An outage makes the attempt ENVIRONMENT_FAILED. An error that is neither an outage nor the agent's own is a
        bug in engine or tool, which ends the run."""
        if isinstance(error, Unavailable):
            self.fault = self.fault or str(error)
        elif not isinstance(error, DataError | AttemptOver | AgentFailed):
            self.broken = self.broken or error

    async def end(self, seconds: float) -> None:
        """The agent has ended: refuse further requests, and wait for those it gave up, not much longer than so many
        seconds. It gives up all that are under way, whether or not their connections have ended, and when that is
        known."""
        self.over = True
        for asking in self.asking if not self.is_late else ():
            self._give_up(asking)
        left = [asking for asking, given_up in self.asking.items() if given_up < inf]
        if left and (await asyncio.wait(left, timeout=FIRST_LOOK_SECONDS + seconds))[1]:
            reason = f"an abandoned request neither progressed nor ended within rollout.agent_seconds = {seconds:g}"
            self.blame(Unavailable(reason))

    async def close(self) -> None:
        self.over = True
        for asking in self.asking:
            asking.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        unclosed = await asyncio.gather(*(tool.close() for tool in self._own), return_exceptions=True)
        for thread in self._said.threads:  # a cancelled request may have left any of them
            await self._engine.close_session(thread.session)
        for error in unclosed:
            if isinstance(error, Exception):
                self.blame(error)

    def trajectory(self, index: int, stop: Stop | None, why: str | None, seconds: float) -> Trajectory:
        """The trajectory, not yet verified. stop, why: how the agent ended, and its description; None: normally."""
        turns = [turn for thread in self._said.threads for turn in thread.turns]  # the last answered one at the end
        prompt = turns[0].prompt_ids if turns else self._opening
        turns[:1] = [replace(turn, prompt_ids=()) for turn in turns[:1]]
        # Past a limit: it failed because of our refusal, or after a cut answer.
        limited = stop is Stop.AGENT_FAILED and self.stop is not Stop.ANSWERED
        ended = self.stop if stop is None or limited else stop
        return Trajectory(
            problem_id=self.problem.id,
            index=index,
            prompt_ids=prompt,
            turns=tuple(turns),
            stop=ended if self.fault is None else Stop.ENVIRONMENT_FAILED,
            fault=self.fault or (None if limited and self.refused else why),
            seconds=seconds,
            tool_seconds=sum(turn.tool_seconds or 0.0 for turn in turns),
        )

    def _refuse_late(self) -> None:
        if self.over:
            raise AttemptOver("the attempt has ended")

    def _check(self, text: str) -> None:
        """Raises AttemptOver for a text without room, before it is encoded, which would block the run."""
        if (least := self._conversation.codec.least_tokens(text)) > self._room:
            raise self._no_room(f"at least {least}", self._room)

    def _no_room(self, tokens: int | str, room: int) -> AttemptOver:
        self.stop, self.refused = Stop.MAX_TOKENS, True
        return AttemptOver(f"the request has {tokens} tokens; rollout.max_response_tokens leaves room for {room}")

    async def _continued(self, thread: Thread, chat: Chat, most: int | None, stops: Sequence[str]) -> Answer:
        """Turn a completion of `thread.asked` into an answer, and record it. Raises AttemptOver, Unavailable."""
        conversation, ids = self._conversation, thread.asked
        try:
            if (room := self._room - len(ids)) <= 0:
                raise self._no_room(len(ids), self._room)
            again, self._seen[ids] = self._seen[ids], self._seen[ids] + 1
            seed = seed_for(self._sampling.seed, again, *ids)  # independent of other requests under way
            sent, most = time.monotonic(), min(room, most or room)
            whole = await self._sampled(thread, replace(self._sampling, max_new_tokens=most, seed=seed))
            seconds = time.monotonic() - sent
            self._refuse_late()
            if whole.finish is Finish.ABORTED:
                raise EngineUnavailable("the completion was aborted before the model had ended it")
            if not whole.token_ids:
                raise self._no_room(len(ids), len(ids))
            completion, text = self._before(whole, stops)
            calls = typed(conversation.template.calls, text, self._calls, chat.tools) if chat.tools else []
            if not all(_is_sound(call) for call in calls):
                calls = []  # the agent reads the raw text
            self._calls += len(calls)
            message = Message(
                role=Role.ASSISTANT,
                content=conversation.template.calls.strip(text).strip() if calls else text,
                calls=tuple((call.tool, call.arguments) for call in calls),
            )
            turn = Turn(completion=completion, calls=tuple(calls), engine_seconds=seconds)
            self._said.answered(thread, chat, message, turn)
            cut = completion.finish is Finish.LENGTH
            self.stop, self.refused = Stop.MAX_TOKENS if cut else Stop.ANSWERED, False
            return Answer(message, tuple(calls), cut, len(ids), len(completion.token_ids))
        finally:
            thread.asked = ()

    async def _sampled(self, thread: Thread, sampling: Sampling) -> Completion:
        """Continue a conversation. Engines keep the cache of a conversation that waits for its next request, so an
        attempt has at most one: if attempts waited for room while holding some, all could deadlock."""
        engine, rested, self._resting = self._engine, self._resting, None
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

    async def _called(self, tool: Tool, tool_call: ToolCall) -> str:
        """The agent may give up a running program, but not one that its tool has not started."""
        async with self._own_call:
            self._refuse_late()
            sent = time.monotonic()
            result = await tool.run(tool_call, seed=seed_for(self._sampling.seed, tool_call.id))
        self.ends -= result.run_seconds
        reason, began = "a tool call was given up before its program ran", time.monotonic() - result.run_seconds
        if (task := asyncio.current_task()) and sent < self.asking[task] < began:
            self.blame(Unavailable(reason))
        elif task and began > sent + LOOK_SECONDS and self.asking[task] == inf:
            await self._lost(reason)
        self._said.ran(tool_call, result)
        return self._conversation.feedback(result)

    async def _held(self, work: Coroutine[Any, Any, T], request: str = "") -> T:
        """Wait for work that `close` cancels. If the agent gives it up, it continues until the reason is known. Its
        errors are passed to `blame`. request: its id for engines."""
        asking = asyncio.create_task(work, name=request)
        self.since = self.since or time.monotonic()
        self.asking[asking] = inf
        asking.add_done_callback(self._held_no_more)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.cancelled():
                raise AttemptOver("the attempt has ended") from None
            if asking in self.asking and not self.is_late:  # else the run cancels it
                self._give_up(asking)
            raise

    def _give_up(self, asking: asyncio.Task[Any]) -> None:
        """Cancel a request to the model once its engine has made progress or is lost."""

        def look() -> None:
            if (request := asking.get_name()) in self._engine.load().standing:
                loop.call_later(LOOK_SECONDS, look)
            elif request:
                asking.cancel()

        if self.asking[asking] == inf:
            self.asking[asking], loop = time.monotonic(), asyncio.get_running_loop()
            loop.call_later(FIRST_LOOK_SECONDS, look)

    def _held_no_more(self, asking: asyncio.Task[Any]) -> None:
        del self.asking[asking]
        if not self.asking:
            self.ends, self.since = self.ends + time.monotonic() - self.since, 0.0
        error = None if asking.cancelled() else asking.exception()
        if isinstance(error, Exception) and not (asking.cancelling() and isinstance(error, Unavailable)):
            self.blame(error)  # except an outage caused by `close`

    async def _lost(self, reason: str) -> None:
        """The work of this task was lost for a time; blame the outage if the agent no longer waits for it."""
        try:
            await asyncio.sleep(LOOK_SECONDS)  # by then a client's disconnection is known here
        finally:
            if (task := asyncio.current_task()) and (self.asking[task] < inf or task.cancelling()):
                self.blame(Unavailable(reason))

    def _before(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The completion up to the token in which one of the texts ends, and its text before it."""
        codec, ids = self._conversation.codec, completion.token_ids
        text = codec.decode(ids[:-1] if ids[-1:] and ids[-1] in self._sampling.stop_token_ids else ids)
        shown, length = min(((text.find(stop), len(stop)) for stop in stops if stop and stop in text), default=(-1, 0))
        if shown < 0:
            return completion, text
        tokens = bisect_left(range(len(ids)), shown + length, key=lambda n: len(codec.decode(ids[:n])))
        return completion.stopped_after(tokens), text[:shown]


def _is_sound(call: ToolCall) -> bool:
    """Whether it can be written as JSON."""
    try:
        return not call.parse_error and bool(json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:  # a number that JSON lacks, half of a surrogate pair
        return False


# -- its conversations -----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class Thread:
    """A conversation whose tokens only grow."""

    session: str
    """Its name for engines."""
    ids: tuple[int, ...] = ()
    """All tokens so far, the last completion included."""
    turns: list[Turn] = field(default_factory=list)
    """Turns; the first one has the prompt."""
    asked: tuple[int, ...] = ()
    """The tokens that the current completion continues; empty while there is none."""

    @property
    def request(self) -> str:
        """The name of its next completion for engines."""
        return f"{self.session}/{len(self.turns)}"


class Conversations:
    """Those of one attempt."""

    def __init__(self, conversation: Conversation, name: str) -> None:
        self._conversation, self._name = conversation, name
        self._answers: dict[str, tuple[Thread, tuple[int, ...]]] = {}
        """By the messages up to and including an answer: its conversation, and all tokens up to its end."""
        self.threads: list[Thread] = []
        """In the order of their last answers."""

    def place(self, chat: Chat, check: Callable[[str], None]) -> Thread:
        """The conversation of a request, with `asked` set. check: called with each text before it is encoded; it may
        raise. Raises Refused for messages that do not alternate as in a conversation."""
        _check(chat.messages)
        conversation, template = self._conversation, self._conversation.template
        past = max((n for n, message in enumerate(chat.messages, 1) if message.role is Role.ASSISTANT), default=0)
        thread, given = self._answers.get(_key(chat.tools, chat.messages[:past]), (None, ()))
        if thread:
            texts = [message.content for message in chat.messages[past:]]  # one question, or results
            follows = template.reply(texts) if chat.messages[past].role is Role.TOOL else template.next_question(*texts)
            stop = template.stop if chat.messages[past].role is Role.TOOL else end_of_answer(template)
            check(text_of(follows))
            ids = (*given, *conversation.after_tokens(given, stop, follows))
        else:
            parts = tuple(pieces(chat, template, chat.tools or ()))
            check("".join(part.text for part in parts))
            ids = encoded(parts, conversation.codec, template.reserved).token_ids
        if thread is None or thread.ids != given or thread.asked:
            thread = Thread(session=f"{self._name}/{len(self.threads)}")
            self.threads.append(thread)
        thread.asked = ids
        return thread

    def answered(self, thread: Thread, chat: Chat, answer: Message, turn: Turn) -> None:
        """Record the turn that answered the request; its completion reads as this message."""
        ids = thread.asked
        if thread.turns:
            thread.turns[-1] = replace(thread.turns[-1], reply_ids=ids[len(thread.ids) :])
        thread.turns.append(turn if thread.turns else replace(turn, prompt_ids=ids))
        thread.ids = (*ids, *turn.completion.token_ids)
        self.threads.remove(thread)
        self.threads.append(thread)
        self._answers[_key(chat.tools, (*chat.messages, answer))] = thread, thread.ids

    def ran(self, call: ToolCall, result: ToolResult) -> None:
        """Record a call of the run's tools with the answer before it, as that answer's own call if it made it."""
        latest = next((thread for thread in reversed(self.threads) if thread.turns), None)
        if latest is None:
            return
        last = latest.turns[-1]
        done, calls = len(last.results), list(last.calls)
        left = range(done, len(calls))
        own = next((n for n in left if (calls[n].tool, calls[n].arguments) == (call.tool, call.arguments)), None)
        calls.insert(done, call if own is None else calls.pop(own))
        results = (*last.results, replace(result, call_id=calls[done].id))
        seconds = (last.tool_seconds or 0.0) + result.run_seconds
        latest.turns[-1] = replace(last, calls=tuple(calls), results=results, tool_seconds=seconds)


FOLLOWS: Mapping[Role | None, tuple[Role, ...]] = {
    None: (Role.SYSTEM, Role.USER),
    Role.SYSTEM: (Role.USER,),
    Role.USER: (Role.ASSISTANT,),
    Role.ASSISTANT: (Role.USER, Role.TOOL),
    Role.TOOL: (Role.TOOL, Role.ASSISTANT),
}


def _check(messages: Sequence[Message]) -> None:
    """Raises Refused."""
    before = None
    for number, message in enumerate(messages):
        if HALF_PAIR.search(message.text):
            raise Refused(Refusal.CHARACTERS, "messages", f"message {number} has half of a surrogate pair")
        if message.role not in FOLLOWS[before]:
            order = f"message {number} is of role {message.role} after {before or 'none'}"
            raise Refused(Refusal.ROLES, "messages", f"{order}; send {' or '.join(FOLLOWS[before])}")
        before = message.role
    if before not in (Role.USER, Role.TOOL):
        raise Refused(Refusal.ROLES, "messages", "end with user or tool")


def _key(tools: Sequence[ToolSpec] | None, messages: Sequence[Message]) -> str:
    """A name for messages and tools; equal ones have the same."""
    parts: list[Any] = [tool_schema(tool) for tool in tools or ()]
    for message in messages:
        calls = [(name, json.dumps(dict(arguments), sort_keys=True)) for name, arguments in message.calls]
        parts.append([message.role, message.content.strip(), calls])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
