"""A conversation as text and as tokens, piece by piece as a rollout lays out its trajectory.

Worked example with one tool call and a second question (P opening, A assistant, S stop marker, R reply, U user):

    token_ids  P0 P1 P2 A0 A1 S  R0 R1 A2 S  U0 U1 A3 S
    loss_mask   0  0  0  1  1 1   0  0  1 1   0  0  1 1

The mask follows from who wrote each piece, and pieces are encoded one by one, so it cannot drift."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rocstar.data.sft.format import Conversation, Message, Role, call_of
from rocstar.dialogue.calls import parse_calls
from rocstar.dialogue.template import PAPER, START, STOP, ChatMl
from rocstar.protocols import TextCodec, ToolSpec
from rocstar.types import Demonstration, SftRow, ToolResult

CHAT = replace(PAPER, system="You are a helpful assistant.", preamble="", opened="")
"""How rows that bring their own tools are written: the paper's tools block and call syntax without its reasoning
clothes. A chat answer right after an open `<reason>`, or under a request for a `\\boxed{}`, would teach the model to
ignore both. Source: ours; the paper does not say how its non-reasoning rows were laid out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that one side wrote in one go."""

    text: str
    learned: bool
    """Whether its tokens carry loss: true exactly for what the assistant writes, stop markers included."""


def pieces(conversation: Conversation, template: ChatMl, tools: Sequence[ToolSpec]) -> Iterator[Piece]:
    """The conversation under a template, in order; it must have passed `check_roles`. `tools` are shown where the
    template lists tools."""
    messages = conversation.messages
    system = messages[0].content if messages[0].role is Role.SYSTEM else None
    first = 0 if system is None else 1
    yield Piece(text=template.opening(messages[first].content, tools, system), learned=False)
    waiting: list[str] = []
    for position, message in enumerate(messages[first + 1 :], first + 1):
        if message.role is Role.ASSISTANT:
            yield Piece(text=message.text, learned=True)
            yield Piece(text=template.stop, learned=True)
        elif message.role is Role.USER:
            yield Piece(text=_next_question(message.content, template), learned=False)
        else:
            waiting.append(message.content)
            if messages[position + 1].role is not Role.TOOL:
                yield Piece(text=template.reply(waiting), learned=False)
                waiting = []


def encoded(parts: Iterator[Piece] | Sequence[Piece], codec: TextCodec) -> SftRow:
    """The pieces as one row, each encoded on its own, because that is where a rollout's pieces meet."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for piece in parts:
        ids = codec.encode(piece.text)
        token_ids += ids
        loss_mask += [piece.learned] * len(ids)
    return SftRow(token_ids=tuple(token_ids), loss_mask=tuple(loss_mask))


def from_demonstration(demo: Demonstration, feedback: Callable[[ToolResult], str]) -> Conversation:
    """A demonstration of the reader's own task; `feedback` words its tool results as a rollout would."""
    messages = [Message(role=Role.USER, content=demo.problem.question)]
    for turn in demo.turns:
        messages.append(written(turn.text))
        messages += [Message(role=Role.TOOL, content=feedback(result)) for result in turn.results]
    return Conversation(messages=tuple(messages), tools=None, source=demo.problem.source)


def written(text: str) -> Message:
    """An assistant message that renders to exactly this text: calls that stand at its end are taken apart, unless
    that would change a byte (calls that do not parse, JSON spaced differently); then it is all content."""
    found = parse_calls(text)
    if found and all(call.parse_error is None for call in found):
        content = text.partition("<tool_call>")[0].rstrip("\n")
        calls = tuple(call_of({"name": call.tool, "arguments": call.arguments}) for call in found)
        message = Message(role=Role.ASSISTANT, content=content, calls=calls)
        if message.text == text:
            return message
    return Message(role=Role.ASSISTANT, content=text)


def _next_question(content: str, template: ChatMl) -> str:
    """A further user message; like `Template.reply`, it stands between two completions."""
    return f"\n{START}user\n{template.preamble}{content}{STOP}\n{template.assistant_header}"
