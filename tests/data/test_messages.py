"""Demonstrations from files of messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.data.messages import load_demonstrations
from rocstar.dialogue.calls import parse_calls
from rocstar.errors import DataError

USER = {"role": "user", "content": "What is 3 * 4?"}
ANSWER = {"role": "assistant", "content": "<answer>\\boxed{12}</answer>"}


def call(arguments: Any, **function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {**function, "arguments": arguments}}]}


TOOL = {"role": "tool", "content": "12\n"}


def written(path: Path, *conversations: Any) -> Path:
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    (gzip.open if path.suffix == ".gz" else open)(path, "wt").write(text)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_conversation_becomes_turns_with_their_results(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [USER, call({"code": "print(3*4)"}, name="python"), TOOL, ANSWER], [USER, ANSWER])
    first, second = load_demonstrations(path, "python")
    assert first.problem.question == "What is 3 * 4?" and first.problem.id == second.problem.id
    (parsed,) = parse_calls(first.turns[0].text)
    assert (parsed.tool, parsed.arguments) == ("python", {"code": "print(3*4)"})
    assert [result.stdout for result in first.turns[0].results] == ["12\n"]
    assert first.turns[1].text == second.turns[0].text == "<answer>\\boxed{12}</answer>"
    assert first.turns[1].results == ()


def test_arguments_may_be_json_text_and_the_name_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [USER, call('{"code": "1"}'), TOOL, ANSWER])
    (parsed,) = parse_calls(load_demonstrations(path, "jupyter_code")[0].turns[0].text)
    assert (parsed.tool, parsed.arguments) == ("jupyter_code", {"code": "1"})


def test_words_and_several_calls_stand_in_one_turn(tmp_path: Path) -> None:
    two = {"role": "assistant", "content": "First", "tool_calls": [*call({"code": "1"})["tool_calls"]] * 2}
    (demo,) = load_demonstrations(written(tmp_path / "r.jsonl", [USER, two, TOOL, TOOL, ANSWER]), "python")
    assert demo.turns[0].text.startswith("First\n<tool_call>") and len(parse_calls(demo.turns[0].text)) == 2
    assert [result.call_id for result in demo.turns[0].results] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("no list", "at least two messages"),
        ([USER], "at least two messages"),
        ([ANSWER, USER], "role user"),
        ([USER, USER], "role assistant"),
        ([USER, TOOL, ANSWER], "role assistant"),
        ([USER, {"role": "assistant", "content": 5}], "role assistant with text content"),
        ([USER, call({"code": "1"}), TOOL], "the last message must be the assistant's"),
        ([USER, call("{oops"), TOOL, ANSWER], "field tool_calls is not JSON"),
        ([USER, call("[1]"), TOOL, ANSWER], "function.name and function.arguments"),
        ([USER, call(7), TOOL, ANSWER], "function.name and function.arguments"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": 5}, TOOL, ANSWER], "tool_calls"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [5]}, TOOL, ANSWER], "tool_calls"),
        ([USER, call({"code": "1"}), ANSWER], "1 tool calls is followed by 0 tool messages"),
        ([USER, ANSWER, TOOL, ANSWER], "0 tool calls is followed by 1 tool messages"),
    ],
)
def test_a_broken_row_names_file_line_and_field(tmp_path: Path, messages: Any, complaint: str) -> None:
    path = written(tmp_path / "r.jsonl", [USER, ANSWER], messages)
    with pytest.raises(DataError) as caught:
        load_demonstrations(path, "python")
    assert f"{path}:2 field" in str(caught.value) and complaint in str(caught.value)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"messages": \n')
    with pytest.raises(DataError, match=r"r\.jsonl:1 is not JSON"):
        load_demonstrations(path, "python")


def test_files_that_are_missing_broken_or_empty_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl cannot be read"):
        load_demonstrations(tmp_path / "gone.jsonl", "python")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="holds no conversation"):
        load_demonstrations(empty, "python")
    for name, content in (("torn.jsonl.gz", gzip.compress(b"{}\n" * 999)[:-9]), ("binary.jsonl", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            load_demonstrations(tmp_path / name, "python")
