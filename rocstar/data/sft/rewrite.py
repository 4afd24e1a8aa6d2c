"""What the endpoint writes anew in a conversation: its prompt, its responses. Plain chats only: an endpoint that
rewrites what stands around a tool call would break it.

Source: the paper rewrites the responses of its instruction set and the prompts of its chat set with o4-mini and does
not say how; the wording of the request is ours."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from rocstar.data.sft.format import Conversation, Message, Role
from rocstar.data.sft.refusal import Reason, Refused

T = TypeVar("T")
U = TypeVar("U")

REWORD = (
    "Rewrite the message below so that it asks for the same thing in clear and natural words. Keep every fact, number, "
    "name and constraint. Answer with the rewritten message and nothing else.\n\nThe message:\n"
)


class Answers(Protocol):
    """The part of `Endpoint` used here."""

    async def answer(self, messages: Sequence[dict[str, str]]) -> str: ...


async def rewritten(conversation: Conversation, steps: Sequence[str], endpoint: Answers) -> Conversation:
    """The conversation after all steps. Raises Refused where a step does not fit, and what the endpoint raises."""
    if conversation.tools or any(m.calls or m.role is Role.TOOL for m in conversation.messages):
        raise Refused(Reason.REWRITE, "tools", "conversations with tools are not rewritten")
    for step in steps:
        conversation = await (_reworded if step == "prompt" else _answered)(conversation, endpoint)
    return conversation


async def _reworded(conversation: Conversation, endpoint: Answers) -> Conversation:
    """Its only user message anew; a later one would refer to words that are gone."""
    asked = [n for n, message in enumerate(conversation.messages) if message.role is Role.USER]
    if len(asked) != 1:
        raise Refused(Reason.REWRITE, "messages", f"{len(asked)} user messages; only a single one can be reworded")
    messages = list(conversation.messages)
    text = await endpoint.answer([{"role": "user", "content": REWORD + messages[asked[0]].content}])
    messages[asked[0]] = Message(role=Role.USER, content=text)
    return replace(conversation, messages=tuple(messages))


async def _answered(conversation: Conversation, endpoint: Answers) -> Conversation:
    """Every assistant message anew, in order, each after those before it; one more where the user has the last word."""
    messages: list[Message] = []
    told = [message for message in conversation.messages if message.role is not Role.ASSISTANT]
    for message, following in zip(told, [*told[1:], None], strict=True):
        messages.append(message)
        if message.role is Role.USER and (following is None or following.role is Role.USER):
            said = [{"role": str(m.role), "content": m.content} for m in messages]
            messages.append(Message(role=Role.ASSISTANT, content=await endpoint.answer(said)))
    return replace(conversation, messages=tuple(messages))


async def in_order(items: Iterable[T], work: Callable[[T], Awaitable[U]], width: int) -> AsyncIterator[U]:
    """Results in the order of the items, `width` of them under way. What `work` raises ends everything: the others
    are cancelled."""
    waiting: deque[asyncio.Task[U]] = deque()

    async def run(item: T) -> U:
        return await work(item)

    try:
        for item in items:
            waiting.append(asyncio.create_task(run(item)))
            if len(waiting) >= width:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
