"""What an agent asks of a model in one attempt, put together from requests that each say everything again.

A request is a list of messages. Those up to an answer that was given before are matched to the tokens of that answer,
never to its text, so what is learnt from is what was sampled:

    request 1   U                      -> tokens  [U] A
    request 2   U A T                  continues  [U] A [T] B           one conversation, A and B learnt from once each
    request 3   U A T'   (a retry)     begins     [U A T'] C            a second one: U A T' are its prompt
    request 4   S        (a summary)   begins     [S] D                 a third

An answer that the agent sends back changed (thoughts dropped, calls rewritten) matches nothing: the request is laid out
from its messages, and continues a conversation only where the tokens are those of one. Source: ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from rocstar.data.sft.format import Chat, Message, Refusal, Refused, Role
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.segments import Segment
from rocstar.dialogue.template import tool_schema
from rocstar.protocols import ToolSpec
from rocstar.rollout.environment import Conversation
from rocstar.types import Completion, ToolCall, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request."""

    chat: Chat
    max_tokens: int | None = None
    """None: as many as there is room for."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""


class Answer(NamedTuple):
    message: Message
    calls: tuple[ToolCall, ...]
    cut: bool
    """By a limit of tokens."""
    read: int
    written: int
    """Tokens."""


@dataclass(eq=False, slots=True, kw_only=True)
class Thread:
    """A conversation whose tokens only grow."""

    number: int
    ids: tuple[int, ...]
    """Of all of it so far, the last completion included; before the first one its prompt."""
    prompt: int
    """How many of them stand before its first completion."""
    turns: list[Turn] = field(default_factory=list)
    asking: bool = False
    """A completion of it is under way."""
    last: int = 0
    """Which answer of the attempt its last one is."""


class Standing(NamedTuple):
    """Where a request stands."""

    thread: Thread
    ids: tuple[int, ...]
    """What is continued."""


class _Given(NamedTuple):
    """A completion that was given, with all that stands before it."""

    thread: Thread
    ids: tuple[int, ...]
    completion: Completion


class Conversations:
    """Those of one attempt."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._answers: dict[str, _Given] = {}
        """By the messages up to it and with it."""
        self.threads: list[Thread] = []
        self._given = 0

    def place(self, chat: Chat) -> Standing:
        """Find where a request stands; its thread is asking from now on. Raises Refused for messages that do not
        alternate as a conversation does."""
        _check(chat.messages)
        ids, thread = self._matched(chat)
        if thread is None:
            thread = Thread(number=len(self.threads), ids=ids, prompt=len(ids))
            self.threads.append(thread)
        thread.asking = True
        return Standing(thread, ids)

    def answered(self, place: Standing, chat: Chat, answer: Message, turn: Turn) -> None:
        """A request was answered by a turn whose completion reads as this message."""
        thread, self._given = place.thread, self._given + 1
        if thread.turns:
            thread.turns[-1] = replace(thread.turns[-1], reply_ids=place.ids[len(thread.ids) :])
        thread.turns.append(turn)
        thread.ids = (*place.ids, *turn.completion.token_ids)
        thread.last = self._given
        *_, key = _keys(chat.tools, (*chat.messages, answer))
        self._answers[key] = _Given(thread, thread.ids, turn.completion)

    def turns(self) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
        """(first prompt, turns) of all conversations one after another, the one that was answered last at the end."""
        prompt: tuple[int, ...] = ()
        found: list[Turn] = []
        for thread in sorted((thread for thread in self.threads if thread.turns), key=lambda thread: thread.last):
            begin = thread.ids[: thread.prompt]
            first, *rest = thread.turns
            prompt = prompt or begin
            found += [replace(first, prompt_ids=begin) if found else first, *rest]
        return prompt, tuple(found)

    def _matched(self, chat: Chat) -> tuple[tuple[int, ...], Thread | None]:
        """(tokens to continue, the thread that they continue if any)."""
        keys = list(_keys(chat.tools, chat.messages))
        for said in range(len(chat.messages) - 1, 0, -1):
            if (answer := self._answers.get(keys[said - 1])) and (after := self._after(chat.messages[said:])):
                ids = (*answer.ids, *self._conversation.after(answer.completion, after))
                goes_on = answer.thread.ids == answer.ids and not answer.thread.asking
                return ids, answer.thread if goes_on else None
        template = self._conversation.template
        laid = encoded(pieces(chat, template, chat.tools or ()), self._conversation.codec, template.reserved).token_ids
        idle = (each for each in self.threads if each.turns and not each.asking and len(each.ids) < len(laid))
        same = [each for each in idle if laid[: len(each.ids)] == each.ids]
        return laid, max(same, key=lambda each: len(each.ids), default=None)

    def _after(self, messages: Sequence[Message]) -> tuple[Segment, ...] | None:
        """What stands between an answer and the next one; None where another answer is among these messages."""
        roles = {message.role for message in messages}
        if roles == {Role.TOOL}:
            return self._conversation.template.reply([message.content for message in messages])
        if roles == {Role.USER} and len(messages) == 1:
            return self._conversation.template.next_question(messages[0].content)
        return None


FOLLOWS = {
    Role.SYSTEM: (Role.USER,),
    Role.USER: (Role.ASSISTANT,),
    Role.ASSISTANT: (Role.USER, Role.TOOL),
    Role.TOOL: (Role.TOOL, Role.ASSISTANT),
}


def _check(messages: Sequence[Message]) -> None:
    """Raises Refused."""
    for number, message in enumerate(messages):
        try:
            message.text.encode()
        except UnicodeEncodeError:
            told = f"message {number} has half of a surrogate pair"
            raise Refused(Refusal.CHARACTERS, "messages", told) from None
    roles = [message.role for message in messages]
    if roles[0] not in (Role.SYSTEM, Role.USER) or roles[-1] not in (Role.USER, Role.TOOL):
        raise Refused(Refusal.ROLES, "messages", "begin with system or user, and end with user or tool")
    for number, (before, role) in enumerate(pairwise(roles), 1):
        if role not in FOLLOWS[before]:
            allowed = " or ".join(FOLLOWS[before])
            raise Refused(
                Refusal.ROLES, "messages", f"message {number} is of role {role} after {before}; send {allowed}"
            )


def _keys(tools: Sequence[ToolSpec] | None, messages: Sequence[Message]) -> Iterator[str]:
    """A name for the first message, the first two, and so on; equal messages after equal ones have the same."""
    told = hashlib.sha256(json.dumps([tool_schema(tool) for tool in tools or ()]).encode())
    for message in messages:
        calls = [(call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in message.calls]
        told.update(json.dumps([message.role, message.content.strip(), calls]).encode())
        yield told.hexdigest()
