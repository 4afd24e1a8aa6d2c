"""Ask a chat endpoint (`support/chat_http.py`) with a cache, and rewrite conversations with it. A request ends in one
of three ways:

- an answer, which is written to the cache before it is used;
- `Refused`: the service read this request and will not answer it (content filter, too long); the row is left out. A
  refusal that names one of `endpoint.parameters` holds for every row, and so does one that came ALIKE times in the same
  words before any answer: a ConfigError;
- a fault of the service or of the network (no connection, 429, 5xx, a body that is no chat completion): the request is
  tried again, then EngineUnavailable; answers so far are kept, so a restarted build resumes. A fault never becomes a
  row."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import httpx

from rocstar.data.sft.format import Chat, Message, Refusal, Refused, Role
from rocstar.errors import ConfigError
from rocstar.support.chat_http import BROKEN_OFF, ENDED, FILTERED, LENGTH, ChatHttp, NoAnswer, refuse_broken_off

ROW_REFUSED = (400, 413, 422)
ALIKE = 20  # refusals; so many rows in a row with one fault of their own are unlikely
REWORD = (
    "Rewrite the message below so that it asks for the same thing in clear and natural words. Keep every fact, number, "
    "name and constraint. Answer with the rewritten message and nothing else.\n\nThe message:\n"
)


class AnswerCache:
    """Answers on disk by request, in one SQLite file, so that no request is paid for twice. Every answer is committed
    before it is used, so a kill loses at most those under way."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file is something else."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._base = sqlite3.connect(path)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not a cache of answers ({error}); give endpoint.cache another name") from None

    def get(self, key: str) -> dict[str, Any] | None:
        found = self._base.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        answer: dict[str, Any] | None = json.loads(found[0]) if found else None
        return answer

    def put(self, key: str, answer: Mapping[str, Any]) -> None:
        with self._base:
            self._base.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))

    def close(self) -> None:
        self._base.close()


class ChatEndpoint(AbstractAsyncContextManager["ChatEndpoint"]):
    """Answers chat messages, from the cache if possible. Use it as an async context manager, inside one loop."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        key: str | None,
        concurrency: int,
        timeout_seconds: float,
        attempts: int,
        parameters: Mapping[str, Any],
        cache: AnswerCache,
    ) -> None:
        """url: base address. attempts: tries of one request. parameters: sent along with every request."""
        self.model, self.parameters, self.cache, self.concurrency = model, parameters, cache, concurrency
        self.http = ChatHttp(url, key=key, parallel=concurrency, seconds=timeout_seconds, tries=attempts)
        self.remembered = 0
        """Requests answered from the cache."""
        self._alone = WeakValueDictionary[str, asyncio.Lock]()
        self._answered = False
        self._refusals = Counter[str]()

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The model's answer, stripped. Raises Refused, EngineUnavailable, ConfigError."""
        request = {**self.parameters, "model": self.model, "messages": list(messages)}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        # Equal requests wait for one another, so that one answer serves all of them, now and in later builds.
        async with self._alone.setdefault(key, asyncio.Lock()):
            choice = self.cache.get(key)
            if choice is None or choice["finish"] in BROKEN_OFF:  # which earlier versions kept
                async with self.http.free:
                    choice = await self.http.post(request, self._read)
                self.cache.put(key, choice)
            else:
                self.remembered += 1
            self._answered = True
        if choice["finish"] not in ENDED:
            raise Refused(Refusal.REWRITE, "messages", f"the endpoint's answer ended for {choice['finish']}")
        text = str(choice["text"]).strip()
        if not text:
            raise Refused(Refusal.REWRITE, "messages", "the endpoint's answer is empty")
        return text

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        """The part of an answer that is kept: text and why it ended. Raises NoAnswer, Refused, ConfigError."""
        status, text = response.status_code, response.text[:300]
        if status in ROW_REFUSED and not self._holds_for_all(text):
            raise Refused(Refusal.REWRITE, "messages", f"the endpoint answers {status}: {text}")
        if not response.is_success:  # no row can be blamed
            raise ConfigError(
                f"{self.http.url} answers {status} for model {self.model!r} ({text}); check endpoint.url, "
                "endpoint.model, endpoint.key_variable and endpoint.parameters"
            )
        try:
            choice = json.loads(response.content)["choices"][0]
            text = choice["message"].get("content")
            finish = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise NoAnswer(f"a body that is no chat completion ({response.content[:60]!r})") from None
        if finish in BROKEN_OFF:  # what is filtered would be filtered again: its row is refused
            refuse_broken_off(finish)
        return {"text": text if isinstance(text, str) else "", "finish": finish}

    def _holds_for_all(self, refusal: str) -> bool:
        """Whether every row would be refused like this one; a row that is too long may be refused by `max_tokens`."""
        self._refusals[refusal] += 1
        alike = self._refusals[refusal] >= ALIKE and not self._answered
        named = any(re.search(rf"\b{re.escape(name)}\b", refusal) for name in self.parameters)
        return (named or alike) and not LENGTH.search(refusal) and not FILTERED.search(refusal)


async def rewritten(conversation: Chat, steps: Sequence[str], endpoint: ChatEndpoint) -> Chat:
    """The conversation after all steps. Plain chats only: an endpoint that rewrites what stands around a tool call
    would break it. Raises Refused where a step does not fit, and what the endpoint raises.

    Source: the paper rewrites the responses of its instruction set and the prompts of its chat set with o4-mini and
    does not say how; the wording of the request is ours."""
    if conversation.tools or any(m.calls or m.role is Role.TOOL for m in conversation.messages):
        raise Refused(Refusal.REWRITE, "tools", "conversations with tools are not rewritten")
    messages = list(conversation.messages)
    for step in steps:
        messages = await (_reworded if step == "prompt" else _answered)(messages, endpoint)
    return replace(conversation, messages=tuple(messages))


async def _reworded(messages: Sequence[Message], endpoint: ChatEndpoint) -> list[Message]:
    """Reword the only user message. With several, the later ones would refer to words that are gone."""
    asked = [message for message in messages if message.role is Role.USER]
    if len(asked) != 1:
        raise Refused(Refusal.REWRITE, "messages", f"{len(asked)} user messages; only a single one can be reworded")
    text = await endpoint.answer([{"role": "user", "content": REWORD + asked[0].content}])
    return [replace(message, content=text) if message is asked[0] else message for message in messages]


async def _answered(old: Sequence[Message], endpoint: ChatEndpoint) -> list[Message]:
    """Rewrite every assistant message in order, each after the new ones before it; add one if the user speaks last."""
    messages: list[Message] = []
    prompts = [message for message in old if message.role is not Role.ASSISTANT]
    for message, following in zip(prompts, [*prompts[1:], None], strict=True):
        messages.append(message)
        if message.role is Role.USER and (following is None or following.role is Role.USER):
            history = [{"role": str(m.role), "content": m.content} for m in messages]
            messages.append(Message(role=Role.ASSISTANT, content=await endpoint.answer(history)))
    return messages
