"""A conversation as text and as tokens, piece by piece as a rollout lays out its trajectory.

Worked example with one tool call and a second question (P opening, A assistant, S stop marker, R reply, U user):

    token_ids  P0 P1 P2 A0 A1 S  R0 R1 A2 S  U0 U1 A3 S
    loss_mask   0  0  0  1  1 1   0  0  1 1   0  0  1 1

The mask follows from who wrote each piece, and pieces are encoded one by one, so it cannot drift."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rocstar.data.sft.format import Chat, Message, Role, call_of
from rocstar.dialogue.calls import HERMES, CallSyntax
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.marked_calls import turn_of
from rocstar.dialogue.segments import Segment, ours, text_of
from rocstar.dialogue.segments import written as by_assistant
from rocstar.dialogue.template import Template
from rocstar.protocols import ToolSpec, end_of_answer
from rocstar.types import Demonstration, SftRow, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive text of one author."""

    segments: tuple[Segment, ...]
    learned: bool
    """Whether its tokens carry loss: true exactly for what the assistant writes, stop markers included."""

    @property
    def text(self) -> str:
        return text_of(self.segments)


def pieces(conversation: Chat, template: Template, tools: Sequence[ToolSpec]) -> Iterator[Piece]:
    """The conversation under a template, in order; it must have passed `check_roles`. `tools` are shown where the
    template lists tools."""
    messages = conversation.messages
    system = messages[0].content if messages[0].role is Role.SYSTEM else None
    first = 0 if system is None else 1
    yield Piece(segments=template.opening(messages[first].content, tools, system), learned=False)
    waiting: list[str] = []
    for position, message in enumerate(messages[first + 1 :], first + 1):
        following = messages[position + 1].role if position + 1 < len(messages) else None
        if message.role is Role.ASSISTANT:
            said = _assistant(message, template.calls, answered=following is Role.TOOL)
            yield Piece(segments=said, learned=True)
            stop = template.stop if following is Role.TOOL or message.calls else end_of_answer(template)
            yield Piece(segments=(ours(stop),), learned=True)
        elif message.role is Role.USER:
            yield Piece(segments=template.next_question(message.content), learned=False)
        else:
            waiting.append(message.content)
            if following is not Role.TOOL:
                yield Piece(segments=template.reply(waiting), learned=False)
                waiting = []


def encoded(parts: Iterable[Piece], codec: Codec, reserved: Sequence[str]) -> SftRow:
    """The pieces as one row, each encoded on its own, because that is where a rollout's pieces meet. `reserved` are
    the template's."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for piece in parts:
        ids = codec.encode_segments(piece.segments, reserved)
        token_ids += ids
        loss_mask += [piece.learned] * len(ids)
    return SftRow(token_ids=tuple(token_ids), loss_mask=tuple(loss_mask))


def from_demonstration(demo: Demonstration, feedback: Callable[[ToolResult], str]) -> Chat:
    """A demonstration of the reader's own task; `feedback` words its tool results as a rollout would."""
    messages = [Message(role=Role.USER, content=demo.problem.question)]
    for turn in demo.turns:
        messages.append(written(turn.text))
        messages += [Message(role=Role.TOOL, content=feedback(result)) for result in turn.results]
    return Chat(messages=tuple(messages), tools=None, source=demo.problem.source)


def written(text: str) -> Message:
    """An assistant message that renders to exactly this text: calls that stand at its end are taken apart, unless
    that would change a byte (calls that do not parse, JSON spaced differently); then it is all content."""
    found = HERMES.parse(text)
    if found and all(call.parse_error is None for call in found):
        content = text.partition("<tool_call>")[0].rstrip("\n")
        calls = tuple(call_of({"name": call.tool, "arguments": call.arguments}) for call in found)
        message = Message(role=Role.ASSISTANT, content=content, calls=calls)
        if message.text == text:
            return message
    return Message(role=Role.ASSISTANT, content=text)


def _assistant(message: Message, syntax: CallSyntax, *, answered: bool) -> tuple[Segment, ...]:
    """What the assistant writes. Call markers are the template's only around calls: those the row lists, or, where it
    lists none, those in the content that tool messages answer (calls that do not parse, JSON spaced differently)."""
    if message.calls:
        content = (by_assistant(message.content),) if message.content else ()
        return turn_of(syntax, content, message.calls)
    if not answered:
        return turn_of(syntax, (by_assistant(message.content),), ())
    split = re.split("(" + "|".join(map(re.escape, syntax.reserved)) + ")", message.content)
    return tuple(ours(part) if place % 2 else by_assistant(part) for place, part in enumerate(split))
