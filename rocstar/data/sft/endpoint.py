"""Any OpenAI-compatible chat endpoint, asked with patience. Three ways it can end, kept apart:

- an answer, which goes to the cache before anyone sees it;
- `Refused`: the service read this request and will not answer it (content filter, too long); the row is left out;
- a fault of the service or of the way there (no connection, 429, 5xx, an answer that is no answer): tried again with
  growing pauses, then EngineUnavailable. A fault never becomes a row."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rocstar.data.sft.cache import AnswerCache, request_key
from rocstar.data.sft.refusal import Reason, Refused
from rocstar.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    import httpx

FIRST_PAUSE_SECONDS = 0.5  # doubled after each try
LONGEST_PAUSE_SECONDS = 30.0  # also of what a Retry-After header may ask for
SETTINGS_WRONG = (401, 403, 404, 405)  # no row can be blamed: key, model or address
ROW_REFUSED = (400, 413, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where to ask, and how."""

    url: str
    """Base address; `/chat/completions` is appended."""
    model: str
    key: str | None = None
    """Sent as bearer token."""
    concurrency: int = 16
    """Requests under way at once."""
    timeout_seconds: float = 120.0
    """Of one request, seconds."""
    attempts: int = 6
    """Tries of one request."""
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    """Before the second try, seconds."""
    parameters: Mapping[str, Any]
    """Sent along with every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One try that failed through no doing of the row."""

    text: str
    pause_seconds: float = 0.0
    """What the service asked to wait, seconds."""


class Endpoint:
    """Answers chat messages, from the cache where it can. Use it as an async context manager, inside one loop."""

    def __init__(self, service: Service, cache: AnswerCache) -> None:
        self._service = service
        self._cache = cache
        self._free = asyncio.Semaphore(service.concurrency)
        self._alone: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._client: httpx.AsyncClient | None = None
        self.asked = 0
        """Requests sent, repeated ones included."""
        self.remembered = 0
        """Requests answered from the cache."""

    async def __aenter__(self) -> Endpoint:
        import httpx

        headers = {"Authorization": f"Bearer {self._service.key}"} if self._service.key else {}
        limits = httpx.Limits(max_connections=self._service.concurrency)
        self._client = httpx.AsyncClient(headers=headers, timeout=self._service.timeout_seconds, limits=limits)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client:
            await self._client.aclose()

    async def answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """What the model answers, stripped. Raises Refused, EngineUnavailable, ConfigError."""
        request = {**self._service.parameters, "model": self._service.model, "messages": list(messages)}
        # Equal requests wait for one another, so that one answer serves all of them, now and on a later build.
        async with self._alone.setdefault(request_key(request), asyncio.Lock()):
            choice = self._cache.get(request)
            if choice is None:
                async with self._free:
                    choice = await self._asked(request)
                self._cache.put(request, choice)
            else:
                self.remembered += 1
        return _usable(choice)

    async def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        fault = Fault(text="")
        for attempt in range(self._service.attempts):
            if attempt:
                await asyncio.sleep(self._pause(attempt, fault))
            self.asked += 1
            tried = await self._try(request)
            if not isinstance(tried, Fault):
                return tried
            fault = tried
        raise EngineUnavailable(
            f"{self._service.url} failed {self._service.attempts} times, last with {fault.text}; "
            "answers so far are kept, so start the build again when it is back"
        )

    async def _try(self, request: Mapping[str, Any]) -> dict[str, Any] | Fault:
        import httpx

        assert self._client is not None
        try:
            response = await self._client.post(f"{self._service.url.rstrip('/')}/chat/completions", json=request)
        except httpx.HTTPError as error:
            return Fault(text=f"{type(error).__name__} {error}".strip())
        if response.status_code in SETTINGS_WRONG:
            raise ConfigError(
                f"{self._service.url} answers {response.status_code} for model {self._service.model!r} "
                f"({response.text[:120]}); check endpoint.url, endpoint.model and endpoint.key_variable"
            )
        if response.status_code in ROW_REFUSED:
            raise Refused(Reason.REWRITE, "messages", f"the endpoint answers {response.status_code}")
        if response.status_code != 200:
            wished = response.headers.get("retry-after", "")
            return Fault(text=f"status {response.status_code}", pause_seconds=float(wished) if wished.isdigit() else 0)
        return _choice(response.content)

    def _pause(self, attempt: int, fault: Fault) -> float:
        own = self._service.first_pause_seconds * 2.0 ** (attempt - 1) * random.uniform(0.75, 1.25)
        return min(max(own, fault.pause_seconds), LONGEST_PAUSE_SECONDS)


def _choice(content: bytes) -> dict[str, Any] | Fault:
    """The part of an answer that is kept: text and why it ended."""
    try:
        choice = json.loads(content)["choices"][0]
        text = choice["message"].get("content")
        return {"text": text if isinstance(text, str) else "", "finish": choice.get("finish_reason")}
    except (ValueError, LookupError, TypeError, AttributeError):
        return Fault(text=f"a body that is no chat completion ({content[:60]!r})")


def _usable(choice: Mapping[str, Any]) -> str:
    if choice["finish"] not in ("stop", None):
        raise Refused(Reason.REWRITE, "messages", f"the endpoint's answer ended for {choice['finish']}")
    text = str(choice["text"]).strip()
    if not text:
        raise Refused(Reason.REWRITE, "messages", "the endpoint's answer is empty")
    return text
