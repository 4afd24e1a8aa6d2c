"""An evaluation's client of an OpenAI-compatible chat endpoint (`support/chat_http.py`). Every field of an answer is
checked here. A refused request is a mistake of the user, and ends the evaluation with one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import msgspec

from rocstar.errors import ConfigError, EngineUnavailable, VerifierUnavailable
from rocstar.support.chat_http import CUT, FILTERED, LENGTH, ChatHttp, NoAnswer, Sleep, refuse_broken_off
from rocstar.support.exits import tell_once
from rocstar.types import Status

TRIES = 6
ANSWER_SECONDS = 3600.0  # 30,000 tokens at 10 a second
JUDGE_TOKENS = 4096  # what Arena-Hard-Auto allows a judge


class TooLong(Exception):
    """The conversation no longer fits into the model behind the endpoint."""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: Any = None
    reasoning: Any = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # the range of the files of attempts


class _TokenCounts(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class RanCall(msgspec.Struct):
    """A call that an agent behind the endpoint ran itself, as `rocstar serve` reports it."""

    tool: str
    status: Status
    output: str
    """The result as the model read it."""
    arguments: dict[str, Any] = {}
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Agent(msgspec.Struct):
    calls: list[RanCall] = []
    response_tokens: Tokens | None = None


class _Answer(msgspec.Struct):
    choices: list[_ChatChoice]
    model: str | None = None
    usage: _TokenCounts | None = None
    rocstar: _Agent = msgspec.field(default_factory=_Agent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One completion of an endpoint."""

    text: str
    """The text, without calls in OpenAI's form."""
    calls: tuple[tuple[str, str, str], ...]
    """(id, function, arguments as the original JSON text) of each call in OpenAI's form."""
    cut: bool
    """Whether it reached `max_tokens`."""
    prompt_tokens: int
    completion_tokens: int
    ran: Sequence[RanCall] = ()
    """Calls that the endpoint ran itself before it wrote this."""
    response_tokens: int | None = None
    """All tokens after the prompt, results of those calls included; None if the endpoint does not report them."""


class ChatClient:
    """One endpoint and one model. Raises EngineUnavailable if it cannot be reached, gives an invalid answer or filters
    it, ConfigError if it refuses the request, does not count its tokens, or answers as another model than before."""

    def __init__(self, url: str, model: str, *, key: str | None, parallel: int, sleep: Sleep = asyncio.sleep) -> None:
        """url: up to and with `/v1`. key: sent as a bearer token, never shown. parallel: requests at once, and
        attempts. Raises ConfigError for an invalid URL."""
        self._http = ChatHttp(url, key=key, parallel=parallel, seconds=ANSWER_SECONDS, tries=TRIES, sleep=sleep)
        self.url, self.model = self._http.url, model
        self.places = asyncio.Semaphore(parallel)
        """An attempt holds one from its first request to its end, or all would be begun before one is finished."""
        self._refused: ConfigError | None = None  # a refusal holds for all waiting requests too
        self.first: Callable[[str, str], str] = dict[str, str]().setdefault
        """(address and model, the name in an answer, gpt-4o-2024-08-06 where gpt-4o is asked) -> the first such name;
        `Recall.first` knows earlier starts' too."""

    async def complete(self, messages: Sequence[Mapping[str, Any]], **body: Any) -> ChatAnswer:
        """body: further fields of the request (`max_tokens`, `temperature`, `tools` ...). Raises TooLong too."""
        async with self._http.free:
            if self._refused is not None:
                raise self._refused
            try:
                request = {"model": self.model, "messages": list(messages), **body}
                return await self._http.post(request, self._read)
            except ConfigError as error:
                self._refused = error
                raise

    async def ask(self, prompt: str, *, system: str) -> str:
        """The model's text as a judge of answers, at temperature 0. Raises VerifierUnavailable."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        try:
            return (await self.complete(messages, temperature=0.0, max_tokens=JUDGE_TOKENS)).text
        except (EngineUnavailable, TooLong) as error:
            raise VerifierUnavailable(f"the judge: {error}") from error

    async def close(self) -> None:
        await self._http.close()

    def _read(self, response: httpx.Response) -> ChatAnswer:
        if not response.is_success:
            status, text = response.status_code, response.text
            if status == 400 and LENGTH.search(text):
                raise TooLong(text[:300])
            if status == 400 and FILTERED.search(text):
                raise EngineUnavailable(f"a filter of {self.url} refuses to answer: {text[:300]}")
            if status < 400:
                text = f"it is at {response.headers.get('location')}; give that address as far as /v1"
            raise ConfigError(f"{self.url} refuses the request with status {status}: {text[:300]}")
        try:
            answer = msgspec.json.decode(response.content, type=_Answer)
            choice = answer.choices[0]
        except (msgspec.DecodeError, IndexError, RecursionError) as error:
            raise NoAnswer(f"an invalid answer, {error}: {response.text[:300]}") from error
        refuse_broken_off(choice.finish_reason)
        if answer.model and (first := self.first(f"{self.url} {self.model}", answer.model)) != answer.model:
            raise ConfigError(
                f"{self.url} answered as {first!r}, and now as {answer.model!r}: figures of two models are "
                "no figures of one, so name one of them as the model"
            )
        if answer.usage is None:
            raise ConfigError(f"{self.url} does not report how many tokens it wrote (`usage`), so no length is known")
        calls, message = choice.message.tool_calls or [], choice.message
        thought = message.reasoning_content or message.reasoning
        if thought and not calls and not message.content:
            tell_once(
                f"{self.url} gave an answer that is all reasoning and has no text, which counts as no answer; if many "
                "are, the reasoning parser there is not made for this model"
            )
        return ChatAnswer(
            text=message.content or "",
            calls=tuple((call.id, call.function.name, call.function.arguments) for call in calls),
            cut=choice.finish_reason in CUT,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            ran=answer.rocstar.calls,
            response_tokens=answer.rocstar.response_tokens,
        )
