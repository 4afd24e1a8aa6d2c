"""The one JSON form: read, written, and loaded to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.sft.check import load_conversations
from rocstar.data.sft.format import conversation_of, dumped, row_of
from rocstar.dialogue.calls import HERMES
from rocstar.errors import DataError
from tests.data_sft.support import WEATHER, calls, result, says, talk, user
from tests.files import jsonl

ASK = user("What is 3 * 4?")
ANSWER = says("<answer>\\boxed{12}</answer>")
TWELVE = result("12\n")


def call(arguments: Any, **function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {**function, "arguments": arguments}}]}


def file_of(path: Path, *conversations: Any) -> Path:
    return jsonl(path, *({"messages": messages} for messages in conversations))


def test_a_row_is_written_in_openai_form_and_read_back() -> None:
    conversation = talk(user(), calls({"city": "Paris"}, {"city": "Rome"}), result("a"), result("b"), says())
    row = row_of(conversation)
    first, second = row["messages"][1]["tool_calls"]
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert first == {"id": "call_0", "type": "function", "function": function} and second["id"] == "call_1"
    assert [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"] == ["call_0", "call_1"]
    assert row["tools"] == [
        {"type": "function", "function": WEATHER | {"parameters": row["tools"][0]["function"]["parameters"]}}
    ]
    assert conversation_of(json.loads(dumped(row))) == conversation
    later = row_of(talk(user(), calls(), result("a"), calls({"city": "Rome"}), result("b"), says()))
    assert [m["tool_call_id"] for m in later["messages"] if m["role"] == "tool"] == ["call_0", "call_1"]


def test_equal_conversations_share_an_id_whatever_their_source() -> None:
    one = conversation_of({"messages": [user(), says()], "tools": [], "source": "a"})
    other = conversation_of({"messages": [user(), says()], "tools": [], "source": "b"})
    assert one.id == other.id != conversation_of({"messages": [user(), says("No.")], "tools": []}).id


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_becomes_conversations(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path / name, [ASK, call({"code": "print(3*4)"}, name="python"), TWELVE, ANSWER], [ASK, ANSWER])
    first, second = load_conversations(path, "python")
    (parsed,) = HERMES.parse(first.messages[1].text)
    assert (parsed.tool, parsed.arguments) == ("python", {"code": "print(3*4)"})
    assert first.messages[2].content == "12\n" and first.tools is None
    assert first.messages[3] == second.messages[1]


def test_arguments_may_be_json_text_and_the_name_may_be_left_out(tmp_path: Path) -> None:
    path = file_of(tmp_path / "r.jsonl", [ASK, call('{"code": "1"}'), TWELVE, ANSWER])
    (parsed,) = HERMES.parse(load_conversations(path, "jupyter_code")[0].messages[1].text)
    assert (parsed.tool, parsed.arguments) == ("jupyter_code", {"code": "1"})


def test_words_and_several_calls_stand_in_one_turn(tmp_path: Path) -> None:
    two = {"role": "assistant", "content": "First", "tool_calls": [*call({"code": "1"})["tool_calls"]] * 2}
    path = file_of(tmp_path / "r.jsonl", [ASK, two, TWELVE, TWELVE, ANSWER])
    (conversation,) = load_conversations(path, "python")
    text = conversation.messages[1].text
    assert text.startswith("First\n<tool_call>") and len(HERMES.parse(text)) == 2


def test_a_conversation_may_have_a_system_text_several_questions_and_end_with_calls(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    path = file_of(tmp_path / "r.jsonl", [system, ASK, ANSWER, ASK, call({"code": "1"}, name="python")])
    assert len(load_conversations(path, "python")[0].messages) == 5


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("no list", "expected a list of messages"),
        ([ASK], "at least two messages"),
        ([ANSWER, ASK], "role user"),
        ([ASK, ASK], "role assistant"),
        ([ASK, TWELVE, ANSWER], "role assistant"),
        ([ASK, {"role": "assistant", "content": 5}], "role assistant with text content"),
        ([ASK, {"role": "developer", "content": "x"}], "got 'developer'"),
        ([ASK, call({"code": "1"}), TWELVE], "the last message must be the assistant's"),
        ([ASK, ANSWER, ASK], "the last message must be the assistant's"),
        ([ASK, call("{oops"), TWELVE, ANSWER], "field tool_calls: is not JSON"),
        ([ASK, call("[1]"), TWELVE, ANSWER], "function.name and function.arguments"),
        ([ASK, call(7), TWELVE, ANSWER], "function.name and function.arguments"),
        ([ASK, {"role": "assistant", "content": "x", "tool_calls": 5}, TWELVE, ANSWER], "tool_calls"),
        ([ASK, {"role": "assistant", "content": "x", "tool_calls": [5]}, TWELVE, ANSWER], "tool_calls"),
        ([ASK, call({"code": "1"}), ANSWER], "1 tool calls is followed by 0 tool messages"),
        ([ASK, ANSWER, TWELVE, ANSWER], "0 tool calls is followed by 1 tool messages"),
        ([ASK, call({"code": "1"}), TWELVE, ASK, ANSWER], "role assistant, got user"),
    ],
)
def test_a_broken_row_names_file_line_and_field(tmp_path: Path, messages: Any, complaint: str) -> None:
    path = file_of(tmp_path / "r.jsonl", [ASK, ANSWER], messages)
    with pytest.raises(DataError) as caught:
        load_conversations(path, "python")
    assert f"{path}, line 2: field" in str(caught.value) and complaint in str(caught.value)


def test_a_torn_line_and_a_file_without_conversations_are_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"messages": \n')
    with pytest.raises(DataError, match=r"r\.jsonl, line 1: is not JSON"):
        load_conversations(tmp_path / "r.jsonl", "python")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="holds no conversation"):
        load_conversations(empty, "python")
