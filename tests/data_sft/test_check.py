"""What keeps a row out of training, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from rocstar.data.sft.check import check, check_call
from rocstar.data.sft.format import Chat, Message, Refusal, Refused, Role, normalised, tool_spec
from rocstar.dialogue.template import CHAT
from tests.data_sft.support import WEATHER, calls, result, says, talk, user

LOOSE = {"name": "f", "parameters": {"properties": {"x": {}}}}
MEANT = ("f", {"x": {1: 2}})
"""Keys that are no text become text on the way through JSON."""
LOST = (Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content="", calls=(MEANT,)))


def forged(text: str, who: str) -> Chat:
    said = {"user": "a", "assistant": "b", "tool": "c", who: text}
    return talk(user(said["user"]), calls(), result(said["tool"]), says(said["assistant"]))


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        *((talk(user(), calls(arguments)), reason) for arguments, reason in (
            ({}, Refusal.MISSING_ARGUMENT), ({"city": "Paris", "country": "fr"}, Refusal.UNKNOWN_ARGUMENT),
            ({"city": 7}, Refusal.ARGUMENT_TYPE), ({"city": None}, Refusal.ARGUMENT_TYPE),
            ({"city": "Paris", "days": "3"}, Refusal.ARGUMENT_TYPE),
            ({"city": "Paris", "days": 2.5}, Refusal.ARGUMENT_TYPE),
            ({"city": "Paris", "days": True}, Refusal.ARGUMENT_TYPE),
            ({"city": "Paris", "unit": "K"}, Refusal.ARGUMENT_VALUE), ({"city": "a<|im_end|>"}, Refusal.MARKER),
            ({"city": "</tool_call>"}, Refusal.MARKER), ({"city": "\ud800"}, Refusal.CHARACTERS),
        )),
        *((forged(text, who), Refusal.MARKER)
          for text in ("<|im_end|>", "x <|im_start|>system", "<tool_response>1</tool_response>")
          for who in ("user", "assistant", "tool")),
        (talk(user(), calls(name="get_news")), Refusal.UNKNOWN_TOOL),
        (talk(user(), says(), tools=(WEATHER, WEATHER)), Refusal.TOOLS),
        (talk(user(" "), says()), Refusal.EMPTY),
        (talk(user(), says("\n")), Refusal.EMPTY),
        (talk(user(), calls({"x": [float("nan")]}, name="f"), tools=(LOOSE,)), Refusal.CHARACTERS),
        (talk(user(), calls({"x": [float("inf")]}, name="f"), tools=(LOOSE,)), Refusal.CHARACTERS),
        (Chat(messages=LOST, tools=(tool_spec(LOOSE),)), Refusal.ROUND_TRIP),
        (talk(user(), calls({"zone": "x"}, name="now"), tools=({"name": "now"},)), Refusal.UNKNOWN_ARGUMENT),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused(conversation: Chat, expected: Refusal) -> None:
    with pytest.raises(Refused) as caught:
        check(conversation, CHAT.markers)
    assert caught.value.reason is expected


@pytest.mark.parametrize(
    ("messages", "counted"),
    [
        ([calls({"city": "Paris"}, {"city": "Rome", "days": 2}), result(), result(), says()], 2),
        ([calls({"city": "x", "days": 2.0})], 1),
        ([calls({"city": "x", "days": 10**400})], 1),
        ([calls({"city": "é"})], 1),
        ([calls(), result(""), says()], 1),  # a result may be empty
    ],
)
def test_a_sound_conversation_passes_and_its_calls_are_counted(messages: list[dict[str, Any]], counted: int) -> None:
    assert check(talk(user(), *messages), CHAT.markers) == counted


def test_inner_objects_and_lists_are_checked() -> None:
    address = {"type": "object", "properties": {"street": {"type": "string"}}, "required": ["street"]}
    free = {"type": "object"}
    properties = {"to": address, "tags": {"type": "array", "items": {"type": "string"}}, "extra": free}
    tools = {"send": tool_spec({"name": "send", "parameters": {"properties": properties}})}
    check_call("send", {"to": {"street": "x"}, "tags": ["a"], "extra": {"any": {"thing": 1}}}, tools)
    for wrong, field in (
        ({"to": {}}, r"tool_calls\.send\.to"),
        ({"to": {"street": "x", "no": 1}}, r"tool_calls\.send\.to"),
        ({"tags": ["a", 1]}, r"tool_calls\.send\.tags\[\]"),
    ):
        with pytest.raises(Refused, match=f"field {field}"):
            check_call("send", wrong, tools)


def test_types_in_the_words_of_sources_become_those_of_json_schema() -> None:
    written = {
        "type": "dict",
        "properties": {"a": {"type": "int"}, "b": {"type": "List[float]"}, "c": {"type": "any"}, "d": "odd"},
        "required": ["a", "gone"],
    }
    assert normalised(written) == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "c": {}, "d": {}},
        "required": ["a"],
    }
    assert tool_spec({"name": "f", "parameters": {"properties": {}, "required": None}}).parameters["required"] == []
