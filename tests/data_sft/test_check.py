"""What keeps a row out of training, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from rocstar.data.sft.check import check, check_call
from rocstar.data.sft.format import Chat, FunctionCall, Message, Refusal, Refused, Role, normalised, tool_spec
from rocstar.dialogue.template import CHAT
from tests.data_sft.support import WEATHER, calls, result, says, talk, user

TOOLS = {"get_weather": tool_spec(WEATHER)}


def reason(conversation: Chat) -> Refusal:
    with pytest.raises(Refused) as caught:
        check(conversation, CHAT.markers)
    return caught.value.reason


def test_a_sound_conversation_passes_and_its_calls_are_counted() -> None:
    conversation = talk(user(), calls({"city": "Paris"}, {"city": "Rome", "days": 2}), result(), result(), says())
    assert check(conversation, CHAT.markers) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, Refusal.MISSING_ARGUMENT),
        ({"city": "Paris", "country": "fr"}, Refusal.UNKNOWN_ARGUMENT),
        ({"city": 7}, Refusal.ARGUMENT_TYPE),
        ({"city": None}, Refusal.ARGUMENT_TYPE),
        ({"city": "Paris", "days": "3"}, Refusal.ARGUMENT_TYPE),
        ({"city": "Paris", "days": 2.5}, Refusal.ARGUMENT_TYPE),
        ({"city": "Paris", "days": True}, Refusal.ARGUMENT_TYPE),
        ({"city": "Paris", "unit": "K"}, Refusal.ARGUMENT_VALUE),
        ({"city": "a<|im_end|>"}, Refusal.MARKER),
        ({"city": "</tool_call>"}, Refusal.MARKER),
        ({"city": "\ud800"}, Refusal.CHARACTERS),
    ],
)
def test_a_call_that_breaks_its_schema_is_refused(arguments: dict[str, Any], expected: Refusal) -> None:
    assert reason(talk(user(), calls(arguments))) is expected


@pytest.mark.parametrize("arguments", [{"city": "x", "days": 2.0}, {"city": "x", "days": 10**400}, {"city": "é"}])
def test_a_call_that_keeps_its_schema_passes(arguments: dict[str, Any]) -> None:
    assert check(talk(user(), calls(arguments)), CHAT.markers) == 1


def test_an_unknown_tool_and_a_tool_named_twice_are_refused() -> None:
    assert reason(talk(user(), calls(name="get_news"))) is Refusal.UNKNOWN_TOOL
    assert reason(talk(user(), says(), tools=(WEATHER, WEATHER))) is Refusal.TOOLS


@pytest.mark.parametrize("text", ["<|im_end|>", "x <|im_start|>system", "<tool_response>1</tool_response>"])
@pytest.mark.parametrize("who", ["user", "assistant", "tool"])
def test_a_text_that_would_forge_a_turn_is_refused(text: str, who: str) -> None:
    said = {"user": "a", "assistant": "b", "tool": "c", who: text}
    conversation = talk(user(said["user"]), calls(), result(said["tool"]), says(said["assistant"]))
    assert reason(conversation) is Refusal.MARKER


def test_a_message_that_says_nothing_is_refused_but_an_empty_result_is_not() -> None:
    assert reason(talk(user(" "), says())) is Refusal.EMPTY
    assert reason(talk(user(), says("\n"))) is Refusal.EMPTY
    assert check(talk(user(), calls(), result(""), says()), CHAT.markers) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_arguments_that_json_cannot_write_are_refused(number: float) -> None:
    loose = {"name": "f", "parameters": {"properties": {"x": {}}}}
    assert reason(talk(user(), calls({"x": [number]}, name="f"), tools=(loose,))) is Refusal.CHARACTERS


def test_calls_must_read_back_as_they_were_meant() -> None:
    # Keys that are no text become text on the way through JSON.
    message = Message(role=Role.ASSISTANT, content="", calls=(FunctionCall(name="f", arguments={"x": {1: 2}}),))
    asked = Message(role=Role.USER, content="q")
    tools = (tool_spec({"name": "f", "parameters": {"properties": {"x": {}}}}),)
    assert reason(Chat(messages=(asked, message), tools=tools)) is Refusal.ROUND_TRIP


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


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    tools = {"now": tool_spec({"name": "now"})}
    check_call("now", {}, tools)
    with pytest.raises(Refused, match="not among none"):
        check_call("now", {"zone": "x"}, tools)
