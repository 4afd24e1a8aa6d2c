"""Which tokens are learned: the assistant's, all of them and no others."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocstar.data.sft.check import check, check_tokens
from rocstar.data.sft.format import Chat, Refusal, Refused, conversation_of, row_of
from rocstar.data.sft.render import Piece, encoded, from_demonstration, pieces, written
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.calls import HERMES, render_call
from rocstar.dialogue.segments import ours, text_of
from rocstar.dialogue.template import CHAT, COMPACT, PAPER, ChatMl
from rocstar.dialogue.templates import template_named
from rocstar.types import (
    Completion,
    Demonstration,
    DemoTurn,
    Finish,
    Problem,
    SftRow,
    Status,
    Stop,
    ToolResult,
    Trajectory,
    Turn,
)
from tests.data_sft.support import WEATHER, calls, result, says, talk, user

TEXTS = ["get weather Paris sunny <tool_call> print(1)", 'é ü 漢字 \n\n {"name": 1}', "<answer> 12 </answer>"]
CODEC = train_bpe(TEXTS * 9, vocab_size=400, markers=PAPER.markers, word_merges=False)

words = st.text(alphabet="ab é\n<>{}\"'\\", min_size=1, max_size=12).filter(str.strip)
arguments = st.fixed_dictionaries({"city": words}, optional={"days": st.integers(), "unit": st.sampled_from("CF")})


@st.composite
def conversations(draw: st.DrawFn) -> Chat:
    """Any sound conversation: maybe a system text, questions, calls with results, answers, maybe a call at the end."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(words)))
        for _ in range(draw(st.integers(0, 2))):
            made = draw(st.lists(arguments, min_size=1, max_size=2))
            messages.append(calls(*made, content=draw(st.one_of(st.just(""), words))))
            messages += [result(draw(words)) for _ in made]
        messages.append(says(draw(words)))
    if draw(st.booleans()):
        messages += [user(draw(words)), calls(draw(arguments))]
    return talk(*messages)


def learned_of(row: SftRow) -> str:
    return CODEC.decode([t for t, on in zip(row.token_ids, row.loss_mask, strict=True) if on])


def spans_by_search(text: str, header: str, stop: str) -> list[tuple[int, int]]:
    """Where the assistant writes, found in the finished text alone: from each header to the next stop marker."""
    pattern = re.compile(f"{re.escape(header)}(.*?{re.escape(stop)})", re.DOTALL)
    return [found.span(1) for found in pattern.finditer(text)]


@pytest.mark.parametrize("template", [PAPER, COMPACT, CHAT], ids=["paper", "compact", "chat"])
@settings(max_examples=20)
@given(conversation=conversations())
def test_loss_lies_on_the_assistants_characters_and_on_no_others(template: ChatMl, conversation: Chat) -> None:
    parts = list(pieces(conversation, template, conversation.tools or ()))
    text = "".join(piece.text for piece in parts)
    spans, place = [], 0
    for piece in parts:
        if piece.learned and spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + len(piece.text))
        elif piece.learned:
            spans.append((place, place + len(piece.text)))
        place += len(piece.text)
    assert spans == spans_by_search(text, template.assistant_header, template.stop)


@settings(max_examples=20)
@given(conversation=conversations())
def test_the_learned_tokens_read_as_what_the_assistant_writes(conversation: Chat) -> None:
    check(conversation, CHAT.markers)
    parts = list(pieces(conversation, CHAT, conversation.tools or ()))
    row = encoded(parts, CODEC, CHAT.reserved)
    assistant = [message for message in conversation.messages if message.role == "assistant"]
    assert CODEC.decode(row.token_ids) == "".join(piece.text for piece in parts)
    assert learned_of(row) == "".join(message.text + CHAT.stop for message in assistant)
    check_tokens(row, parts, CODEC)
    parsed = [call for message in assistant for call in HERMES.parse(message.text)]
    assert [(c.tool, c.arguments) for c in parsed] == [call for m in assistant for call in m.calls]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_loss_span_that_is_off_by_one_token_is_refused(shift: int) -> None:
    parts = list(pieces(talk(user(), says()), CHAT, ()))
    row = encoded(parts, CODEC, CHAT.reserved)
    mask = (*row.loss_mask[1:], False) if shift < 0 else (False, *row.loss_mask[:-1])
    with pytest.raises(Refused) as caught:
        check_tokens(SftRow(token_ids=row.token_ids, loss_mask=mask), parts, CODEC)
    assert caught.value.reason is Refusal.LOSS_SPAN


@pytest.mark.parametrize("name", ["paper", "compact"])
@settings(max_examples=20)
@given(conversation=conversations())
def test_pieces_are_the_text_of_the_chat_template(name: str, conversation: Chat) -> None:
    """A row read by another trainer through the saved tokenizer's template is laid out the same."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    row = row_of(conversation)
    rendered = environment.from_string(template_named(name).jinja).render(messages=row["messages"], tools=row["tools"])
    parts = pieces(conversation, template_named(name), conversation.tools or ())
    assert "".join(piece.text for piece in parts) + "\n" == rendered


def test_a_two_question_conversation_is_laid_out_in_full() -> None:
    conversation = talk(user("A?"), calls({"city": "X"}), result("1"), says("B."), user("C?"), says("D."), tools=())
    assert "".join(piece.text for piece in pieces(conversation, CHAT, ())) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nA?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "X"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nB.<|im_end|>\n"
        "<|im_start|>user\nC?<|im_end|>\n"
        "<|im_start|>assistant\nD.<|im_end|>"
    )


def test_the_tools_of_a_row_are_shown_under_its_own_system_text() -> None:
    system = {"role": "system", "content": "You sell umbrellas."}
    opening = next(pieces(talk(system, user(), says()), CHAT, talk(user(), says()).tools or ())).text
    assert opening.startswith("<|im_start|>system\nYou sell umbrellas.\n\n# Tools") and '"get_weather"' in opening


@pytest.mark.parametrize(
    "text",
    [
        render_call("python", {"code": "print(1)"}),
        "First.\n" + render_call("python", {"code": "1"}) + "\n" + render_call("python", {"code": "é"}),
        "no call at all",
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>{"name":"python","arguments":{"code":"1"}}</tool_call>',
        render_call("python", {"code": "1"}) + "\nand words after it",
        "",
    ],
)
def test_an_assistant_text_keeps_every_byte(text: str) -> None:
    assert written(text).text == text
    taken_apart = written("First.\n" + render_call("python", {"code": "1"}))
    assert taken_apart.content == "First." and [name for name, _ in taken_apart.calls] == ["python"]


turns = st.lists(
    st.tuples(st.sampled_from([*TEXTS, render_call("python", {"code": "1"})]), st.integers(1, 2)), max_size=3
)


@pytest.mark.parametrize("name", ["paper", "compact"])
@settings(max_examples=20)
@given(made=turns)
def test_a_demonstration_becomes_the_tokens_that_a_rollout_would_record(name: str, made: list[tuple[str, int]]) -> None:
    """Each piece is encoded on its own there:

    token_ids  P0 P1 P2 A0 A1 S  R0 R1 A2 S      (P prompt, A assistant, S stop marker, R reply)
    loss_mask   0  0  0  1  1 1   0  0  1 1
    """

    def feedback(shown: ToolResult) -> str:
        return shown.stdout.strip()

    answers = ToolResult(call_id="call_0", status=Status.OK, stdout="12\n")
    demo = Demonstration(
        problem=Problem(id="p", question="What?", answer="1"),
        turns=(*(DemoTurn(text=text, results=(answers,) * n) for text, n in made), DemoTurn(text="<answer>1</answer>")),
    )
    template = template_named(name)
    turns = []
    for turn in demo.turns:
        ids = (*CODEC.encode(turn.text), CODEC.token_id(template.stop))
        reply = CODEC.encode(text_of(template.reply(["12"] * len(turn.results)))) if turn.results else []
        completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)
        turns.append(Turn(completion=completion, reply_ids=tuple(reply)))
    prompt = tuple(CODEC.encode(text_of(template.opening("What?", ()))))
    recorded = Trajectory(problem_id="p", index=0, prompt_ids=prompt, turns=tuple(turns), stop=Stop.ANSWERED)
    row = encoded(pieces(from_demonstration(demo, feedback), template, ()), CODEC, template.reserved)
    assert row == SftRow(token_ids=recorded.token_ids, loss_mask=recorded.loss_mask)


def test_composed_accents_are_no_difference_but_other_changes_are() -> None:
    class Composing:
        """Tokens are characters; composes accents, and loses every "x" on the way back."""

        def decode(self, token_ids: Any) -> str:
            return unicodedata.normalize("NFC", "".join(map(chr, token_ids))).replace("x", "")

    codec: Any = Composing()
    for text, sound in (("cafe\u0301", True), ("xylophone", False)):
        parts = [Piece(segments=(ours(text),), learned=True)]
        row = SftRow(token_ids=tuple(map(ord, text)), loss_mask=(True,) * len(text))
        if sound:
            check_tokens(row, parts, codec)
        else:
            with pytest.raises(Refused):
                check_tokens(row, parts, codec)


def test_a_row_without_tools_is_told_from_one_that_has_none() -> None:
    assert conversation_of({"messages": [user(), says()]}).tools is None
    assert conversation_of({"messages": [user(), says()], "tools": []}).tools == ()
    assert conversation_of({"messages": [user(), says()], "tools": [WEATHER]}).tools is not None
