"""Attempts of a model behind an OpenAI-compatible endpoint: it gets messages, its tool calls run in our sandbox.

An endpoint returns text and counts, not token ids. So the "tokens" of such an attempt are the code points of its text
(`CODE_POINTS`), log-probabilities are nan, and `told_tokens` is what the server counted: all readers of attempts
(verifiers, figures, parquet) can read these too; they can't be trained on.

Calls come back in OpenAI's form (`tools="openai"`) or are written in the text as in the paper (`tools="text"`: the
schemas are in the system message, results in a user message); calls in the text are parsed in both. With `tools="none"`
no tool runs here: the endpoint is an agent that runs its own, and the calls that it reports (`rocstar serve` does) are
recorded as turns before its answer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from rocstar.dialogue.calls import CLOSE, HERMES, OPEN, render_call
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import Segment, text_of
from rocstar.dialogue.template import START, STOP, ChatMl, tools_block
from rocstar.errors import ConfigError, Unavailable
from rocstar.evaluation.chat_client import ChatAnswer, ChatClient, RanCall, TooLong
from rocstar.protocols import Marked, Reply, ToolSpec, Verifier, tool_schema
from rocstar.rollout.environment import AttemptLimits, Conversation, EnvironmentFactory, OneTurn, specs_of
from rocstar.rollout.episode import Note, answered, note_nothing
from rocstar.types import Completion, Finish, Problem, Sampling, Status, Stop, ToolCall, ToolResult, Trajectory, Turn

ToolStyle = Literal["openai", "text", "none"]
NO_LIMIT = 1 << 60  # tokens are counted by the server, not by the environment


class CodePoints(Codec):
    """Text as its code points, one per token: replaces the unavailable tokenizer of a remote model."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_segments(self, segments: Iterable[Segment], reserved: Sequence[str]) -> list[int]:
        return self.encode(text_of(segments))

    def stop_ids(self, template: Marked) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSolver:
    """Makes attempts at an endpoint; a Solver. `limits` apply to the server's token counts, tool replies included."""

    client: ChatClient
    conversation: Conversation
    """Its codec is CodePoints; its template gives the text around a question."""
    verifier: Verifier
    limits: AttemptLimits
    tools: ToolStyle
    words: ChatMl
    """Its system text and preamble surround the question of problems without messages of their own."""
    environment: EnvironmentFactory
    capped: bool = True
    """Whether the user set `limits.max_response_tokens`: an endpoint that holds less is then refused; otherwise its own
    limit applies."""
    note: Note = note_nothing

    @property
    def codec(self) -> Codec:
        return self.conversation.codec

    async def attempt(self, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        """One attempt, not yet verified. A service failure, here or at the endpoint, ends it as ENVIRONMENT_FAILED.
        Raises ConfigError if the endpoint refuses a request."""
        async with self.client.places:
            began = time.monotonic()
            one_attempt = EndpointAttempt(self, problem, sampling)
            stop, fault = Stop.ENVIRONMENT_FAILED, None
            try:
                stop = await one_attempt.carry_out()
            except Unavailable as error:
                fault = str(error)
            finally:
                await one_attempt.environment.close()
        return Trajectory(
            problem_id=problem.id,
            index=index,
            prompt_ids=tuple(self.codec.encode(chat_text((one["role"], one["content"]) for one in one_attempt.asked))),
            turns=tuple(one_attempt.turns),
            stop=stop,
            fault=fault,
            seconds=time.monotonic() - began,
            tool_seconds=sum(turn.tool_seconds or 0.0 for turn in one_attempt.turns),
            told_tokens=one_attempt.used_tokens,
        )


class EndpointAttempt:
    """The messages of one attempt, and its turns so far."""

    def __init__(self, solver: EndpointSolver, problem: Problem, sampling: Sampling) -> None:
        self._solver = solver
        self._sampling = sampling
        limits = replace(solver.limits, max_response_tokens=NO_LIMIT)
        self.environment = solver.environment(problem, solver.conversation, limits, sampling.seed)
        self.turns: list[Turn] = []
        self.used_tokens = 0
        """Tokens after the prompt, as the server counted them."""
        own = [replace(spec, name=spec.name.replace(".", "_")) for spec in specs_of(problem)]  # for OpenAI's form
        ours = (tool.spec for tool in (*solver.conversation.tools, *solver.conversation.own_tools()))
        self._specs = own or list(ours)
        self.asked = opening(solver, problem, self._specs)
        self._messages = list(self.asked)
        self._prompt_tokens: int | None = None

    async def carry_out(self) -> Stop:
        """Alternate completions and calls until the attempt ends; returns why it ended. Raises Unavailable,
        ConfigError."""
        while True:
            room = self._solver.limits.max_response_tokens - self.used_tokens
            if room <= 0:
                return Stop.MAX_TOKENS
            sent = time.monotonic()
            try:
                written = await self._written(room)
            except TooLong as error:
                if not self.turns:
                    raise ConfigError(
                        f"the model at {self._solver.client.url} is too short for this evaluation ({error}); "
                        + ("lower --max-response-tokens" if self._solver.capped else "leave such problems out")
                    ) from None
                return Stop.MAX_TOKENS
            written = replace(written, cut=written.cut or written.completion_tokens > room)
            reply = await self._replied(written, time.monotonic() - sent)
            if reply.stop is not None:
                return reply.stop

    async def _written(self, room: int) -> ChatAnswer:
        """At most `room` tokens, or as many as the remote model has left, which is unknown beforehand; a first request
        with a cap set by the user must have them all. Raises TooLong."""
        complete, body = self._solver.client.complete, self._body(room)
        try:
            return await complete(self._messages, **body)
        except TooLong:
            if self._solver.capped and not self.turns:
                raise
            return await complete(self._messages, **{key: body[key] for key in body if key != "max_tokens"})

    async def _replied(self, written: ChatAnswer, engine_seconds: float) -> Reply:
        if self._prompt_tokens is None:
            self._prompt_tokens = written.prompt_tokens
        self.used_tokens = written.prompt_tokens - self._prompt_tokens + written.completion_tokens
        self.used_tokens = written.response_tokens or self.used_tokens
        text = said(written)
        self.turns += [ran_turn(self._solver.codec, ran, len(self.turns) + n) for n, ran in enumerate(written.ran)]
        completion = text_completion(self._solver.codec, text, cut=written.cut)
        self.turns.append(Turn(completion=completion, engine_seconds=engine_seconds))
        received = time.monotonic()
        reply = await self.environment.reply(completion)
        self.turns[-1] = answered(self.turns[-1], reply, time.monotonic() - received)
        self._messages += following(written, text, [self._solver.conversation.feedback(one) for one in reply.results])
        return reply

    def _body(self, room: int) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": room, "temperature": self._sampling.temperature}
        if self._sampling.top_p < 1:
            body["top_p"] = self._sampling.top_p
        if self._sampling.temperature > 0:
            body["seed"] = (self._sampling.seed + len(self.turns)) % 2**31
        if self._specs and self._solver.tools == "openai":
            body["tools"] = [tool_schema(spec) for spec in self._specs]
        return body


def chat_text(messages: Iterable[tuple[str, Any]]) -> str:
    """(role, text) of messages as one text with marks between them; record/formats.py reads it."""
    return "".join(f"{START}{role}\n{text}{STOP}\n" for role, text in messages)


def text_completion(codec: Codec, text: str, *, cut: bool) -> Completion:
    """A remote model's text, with unknown log-probabilities. cut: by a token limit."""
    ids = tuple(codec.encode(text))
    finish = Finish.LENGTH if cut else Finish.STOP
    return Completion(token_ids=ids, logprobs=(math.nan,) * len(ids), finish=finish)


def ran_turn(codec: Codec, ran: RanCall, number: int) -> Turn:
    """A call that the endpoint ran itself, as a separate turn of the model."""
    name, raw = f"call_{number}", render_call(ran.tool, ran.arguments)
    printed, failed = (ran.output, "") if ran.status is Status.OK else ("", ran.output)
    result = ToolResult(call_id=name, status=ran.status, stdout=printed, stderr=failed, run_seconds=ran.seconds)
    return Turn(
        completion=text_completion(codec, raw, cut=False),
        calls=(ToolCall(id=name, tool=ran.tool, arguments=ran.arguments, raw=raw),),
        results=(result,),
        reply_ids=tuple(codec.encode(f"\n{ran.output}\n")),
    )


def opening(solver: EndpointSolver, problem: Problem, specs: Sequence[ToolSpec]) -> list[Mapping[str, Any]]:
    """The first messages."""
    is_bare = solver.environment is OneTurn
    system = solver.words.system if problem.system is None and not is_bare else problem.system
    messages: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages += [message for message in problem.messages[:-1] if message["role"] != "system"]
    preamble = "" if is_bare else solver.words.preamble
    messages.append({"role": "user", "content": preamble + problem.question})
    if not specs or solver.tools != "text":
        return messages
    block = text_of(tools_block(specs))
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": block.strip()}, *messages]
    return [{"role": "system", "content": f"{first['content']}{block}"}, *others]


def said(written: ChatAnswer) -> str:
    """The text of a completion with its calls in the paper's form, as the record holds it."""
    if not written.calls:
        return written.text
    calls = "\n".join(_call(name, arguments) for _, name, arguments in written.calls)
    text = HERMES.strip(written.text)
    return f"{text}\n{calls}" if text else calls


def following(written: ChatAnswer, text: str, results: Sequence[str]) -> list[Mapping[str, Any]]:
    """The next messages: the completion as received, and a result for each call."""
    if not written.calls:
        shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in written.calls
    ]
    answers = [
        {"role": "tool", "tool_call_id": name, "content": result}
        for (name, _, _), result in zip(written.calls, results, strict=False)
    ]
    return [{"role": "assistant", "content": written.text or None, "tool_calls": calls}, *answers]


def _call(name: str, arguments: str) -> str:
    """A call in the paper's form; arguments that are not a JSON object stay verbatim, and become a malformed call."""
    with suppress(ValueError, RecursionError):  # nested too deep to read or write
        decoded = json.loads(arguments)
        if isinstance(decoded, dict):
            return render_call(name, decoded)
    return f"{OPEN}\n{json.dumps(name)}: {arguments}\n{CLOSE}"
