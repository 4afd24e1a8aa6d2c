"""Messages of others as turns. Files of them are in tests/view/test_others.py."""

from __future__ import annotations

from typing import Any

import pytest

from rocstar.record.call_errors import calls_of
from rocstar.record.messages import turns_of


def asks(*names: str) -> dict[str, Any]:
    calls = [{"id": f"id-{name}", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": "I ask.", "tool_calls": calls}


def results(*messages: dict[str, Any]) -> list[list[str | None]]:
    turns, texts = turns_of(messages)
    assert len(turns) == len(texts)
    return [[result and result["stdout"] for result in turn["results"]] for turn in turns]


def test_a_result_belongs_to_the_call_that_it_names_else_to_the_first_without_one() -> None:
    named = {"role": "tool", "tool_call_id": "id-b", "content": "of b"}
    assert results(asks("a", "b"), named, {"role": "tool", "content": "of a"}) == [["of a", "of b"]]
    assert results(asks("a"), {"role": "function", "content": "of a"}, asks("c")) == [["of a"], [None]]


def test_a_result_belongs_to_the_last_turn_that_has_calls() -> None:
    said = {"role": "assistant", "content": "Let me see."}
    assert results(asks("a"), said, {"role": "tool", "content": "of a"}, said) == [["of a"], [], []]
    assert results(asks("a"), asks("c"), {"role": "tool", "content": "of c"}) == [[None], ["of c"]]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"content": "", "error": {"type": "timeout", "message": "Command timed out before completing."}}, "timeout"),
        ({"content": "timed out"}, "timeout"),
        ({"content": "", "error": {"type": "limit", "message": "too long"}}, "output limit"),
        ({"content": "", "error": {"type": "permission", "message": "PermissionError: no"}}, "PermissionError"),
        ({"content": "Traceback (most recent call last)\n  x\nKeyError: 1"}, "KeyError"),
        ({"content": [{"text": "NameError:"}, {"text": " no"}]}, "NameError"),
        ({"content": "boom", "error": "yes"}, None),
        ({"content": 5}, None),
    ],
)
def test_why_a_call_failed_is_what_the_log_or_the_form_of_the_text_says(reply: dict[str, Any], error: Any) -> None:
    turns, _ = turns_of([asks("a"), {"role": "tool", **reply}])
    assert [error for *_, error in calls_of(turns)] == [error]


def test_no_part_of_a_message_is_lost() -> None:
    parts = ["a", {"text": "b"}, {"type": "text", "text": "c"}, {"type": "text"}, None, {"type": "image", "url": "d"}]
    said = {"role": "assistant", "content": parts, "reasoning_content": "hm"}
    assert turns_of([said])[1] == ['<think>hm</think>\nabc\n{"type":"image","url":"d"}\n']
    call = {"function": {"arguments": {"half": "\ud800"}}}
    ((turn,), _) = turns_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert turn["calls"][0]["tool"] == "" and turn["calls"][0]["raw"] == '{"half": "\\ud800"}'


def called(arguments: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": arguments}}], **more}


@pytest.mark.parametrize(
    ("messages", "errors"),
    [
        ([called("print(1"), {"role": "tool", "content": "SyntaxError: never closed"}], ["SyntaxError"]),
        ([called("{}", content=[{"type": "reasoning", "summary": []}]), {"role": "tool", "content": ""}], [None]),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}, {"role": "tool", "content": ""}], [None]),
        ([{"role": "system", "content": [{"type": "text"}]}, called("{}"), {"role": "tool", "content": "1"}], [None]),
    ],
)
def test_unusual_messages_lose_no_call_and_no_error(messages: list[dict[str, Any]], errors: list[str | None]) -> None:
    turns, _ = turns_of(messages)
    assert [error for *_, error in calls_of(turns)] == errors


def test_what_nobody_asked_for_is_a_reply() -> None:
    messages = [
        {"role": "user", "content": "And?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": '{"code": "1/0"}'}}]},
        {"role": "tool", "content": "ZeroDivisionError: division by zero"},
        {"role": "tool", "content": "late"},
    ]
    (first, second), texts = turns_of(messages)
    assert texts == ["", ""] and first["replies"] == [{"role": "user", "text": "And?"}]
    assert [call["arguments"] for call in second["calls"]] == [{"code": "1/0"}]
    assert [result["status"] for result in second["results"]] == ["code_error"]
    assert second["replies"] == [{"role": "tool", "text": "late"}]
