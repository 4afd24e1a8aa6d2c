"""Requests to an OpenAI-compatible chat endpoint, with bounds and bounded retries. Not here: parsing answers and
refusals (`evaluation/chat_client.py`, `data/sft/endpoint.py`).

Tried again: a lost connection, 408, 409, 429, 5xx and NoAnswer, with waits that double, or as the server says."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz
from typing import Any, TypeVar

import httpx

from rocstar.errors import ConfigError, EngineUnavailable

FIRST_WAIT_SECONDS = 1.0  # doubles with each try: 31 s in all before the sixth
LONGEST_WAIT_SECONDS = 120.0  # a server that asks for more is not waited for so long
CONNECT_SECONDS = 20.0
ANSWER_BYTES = 1 << 26  # of one answer, unpacked
AGAIN = (408, 409, 429)
ENDED = ("stop", "eos", "eos_token", "stop_sequence", "tool_calls", "function_call")
"""Reasons for the end of an answer that the model ended; Together says eos, older servers of Hugging Face eos_token."""
CUT = ("length", "model_length")
"""Those of one that reached the limit of its tokens, or, at Mistral, of the model."""
BROKEN_OFF = ("abort", "error", "insufficient_system_resource", "", None)
"""Those that vLLM, SGLang, DeepSeek and Ollama give where they stopped before the model did."""
LENGTH = re.compile(r"context length|maximum context|max_model_len|too long|too many tokens")  # servers' messages
CAP, NEWER_CAP = "max_tokens", "max_completion_tokens"
"""OpenAI's newer models refuse the first and ask for the second, which Ollama and older llama.cpp servers ignore."""
FILTERED = re.compile("content_filter|content_policy|invalid_prompt|SAFETY|RECITATION|BLOCKLIST|PROHIBITED_CONTENT")
"""What OpenAI, Azure and Gemini call an answer or a question that a filter took away."""

Sleep = Callable[[float], Awaitable[None]]
T = TypeVar("T")


class NoAnswer(Exception):
    """An unusable answer: the request is repeated."""


def refuse_broken_off(finish: str | None) -> None:
    """Raises NoAnswer for an answer that neither the model nor a limit ended: BROKEN_OFF, or a filter did. finish: the
    reason of its end."""
    if finish not in (*ENDED, *CUT):
        ended = "a filter" if FILTERED.search(finish or "") else "neither the model nor a limit of tokens"
        raise NoAnswer(f"{ended} ended it: finish_reason {finish or 'null'}")


class ChatHttp:
    """One endpoint. At most `parallel` requests are under way at once."""

    def __init__(
        self, url: str, *, key: str | None, parallel: int, seconds: float, tries: int, sleep: Sleep = asyncio.sleep
    ) -> None:
        """url: up to and with `/v1`. key: sent as a bearer token, never shown. seconds: limit on one request. Raises
        ConfigError for a URL that is none."""
        check_address(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)
        self.url, self.seconds, self.tries, self.sleep = url.rstrip("/"), seconds, tries, sleep
        self.free = asyncio.Semaphore(parallel)
        self.sent = 0
        """Requests, repeated ones included."""
        self._cap = CAP
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=httpx.Limits(max_connections=parallel))

    async def post(self, body: Mapping[str, Any], read: Callable[[httpx.Response], T]) -> T:
        """The result of `read` for the answer, or for a refusal (4xx); retried if it raises NoAnswer. `max_tokens` is
        sent under the name that the endpoint asks for. Must be awaited inside `free`. Raises EngineUnavailable, and
        other errors of `read`."""
        cap = self._cap
        try:
            return await self._post({cap if key == CAP else key: body[key] for key in body}, read)
        except ConfigError as refusal:
            if cap == NEWER_CAP or CAP not in body or NEWER_CAP not in str(refusal):
                raise
            self._cap = NEWER_CAP
            return await self.post(body, read)

    async def _post(self, body: Mapping[str, Any], read: Callable[[httpx.Response], T]) -> T:
        reason, wait = "", 0.0
        for attempt in range(self.tries):
            if attempt:
                await self.sleep(min(LONGEST_WAIT_SECONDS, wait))
            wait = FIRST_WAIT_SECONDS * 2**attempt
            self.sent += 1
            try:
                asked = self._http.stream("POST", f"{self.url}/chat/completions", json=body)
                async with asyncio.timeout(self.seconds), asked as answer:
                    response = await _whole(answer)
                if response.status_code < 500 and response.status_code not in AGAIN:
                    return read(response)
            except (httpx.HTTPError, TimeoutError) as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise ConfigError(f"{self.url}: {error}; name one to trust in SSL_CERT_FILE") from None
                reason = f"{type(error).__name__}: {error}"
            except NoAnswer as error:
                reason = str(error)
            else:
                reason = f"status {response.status_code}: {response.text[:300]}"
                wait = _retry_after(response) or wait
        raise EngineUnavailable(
            f"{self.url} gave no whole answer in {self.tries} tries ({reason}); answers so far are kept, so the same "
            "command asks for the missing ones only"
        )

    async def close(self) -> None:
        await self._http.aclose()


async def _whole(answer: httpx.Response) -> httpx.Response:
    """The answer with its body, unpacked. Raises NoAnswer for one without end."""
    body, headers = bytearray(), answer.headers.copy()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > ANSWER_BYTES:
            raise NoAnswer(f"its answer has more than {ANSWER_BYTES} bytes")
    headers.pop("content-encoding", None)
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body))


def check_address(url: str) -> None:
    """Raises ConfigError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    usable = parsed.host and (parsed.port is None or 0 < parsed.port < 65536)
    if not usable or not re.fullmatch(r"https?://[^\s?#]+", url):
        raise ConfigError(f"{url!r} is no address of an endpoint; write http://host:port/v1")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of a Retry-After header, which may be a date."""
    header = response.headers.get("retry-after", "")
    if re.fullmatch(r"\d{1,6}(\.\d+)?", header):
        return float(header)
    with suppress(ValueError, OverflowError):  # a year that no clock has
        if date := parsedate_tz(header):
            return max(0.0, mktime_tz(date) - time.time())
    return None
