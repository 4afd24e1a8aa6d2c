"""The conversations of one attempt, assembled from an agent's requests, each of which repeats the whole history.

A request is a list of messages. The part up to an earlier answer is matched to the tokens of that answer, never to its
text, so the learner gets exactly the sampled tokens:

    request 1   U                      -> tokens  [U] A
    request 2   U A T                  continues  [U] A [T] B           one conversation, A and B learnt from once each
    request 3   U A T'   (a retry)     begins     [U A T'] C            a second one: U A T' are its prompt
    request 4   S        (a summary)   begins     [S] D                 a third

An answer that the agent sends back changed (thoughts dropped, calls rewritten) matches nothing: the request is rendered
from its messages, as a new conversation. Source: ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocstar.data.sft.format import HALF_PAIR, Chat, Message, Refusal, Refused, Role
from rocstar.data.sft.render import encoded, pieces
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import end_of_answer, tool_schema
from rocstar.protocols import ToolSpec
from rocstar.rollout.environment import Conversation
from rocstar.types import ToolCall, ToolResult, Turn


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
        latest.turns[-1] = replace(
            last,
            calls=tuple(calls),
            results=(*last.results, replace(result, call_id=calls[done].id)),
            tool_seconds=(last.tool_seconds or 0.0) + result.run_seconds,
        )

    def turns(self) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
        """(first prompt, turns) of all conversations in sequence, the one answered last at the end."""
        turns = [turn for thread in self.threads for turn in thread.turns]
        if not turns:
            return (), ()
        return turns[0].prompt_ids, (replace(turns[0], prompt_ids=()), *turns[1:])


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
        calls = [(call.name, json.dumps(dict(call.arguments), sort_keys=True)) for call in message.calls]
        parts.append([message.role, message.content.strip(), calls])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
