"""Messages of others as turns. Files of them are in tests/view/test_others.py."""

from __future__ import annotations

from typing import Any

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


def test_a_program_is_a_call_and_what_nobody_asked_for_is_a_reply() -> None:
    messages = [
        {"role": "user", "content": "And?"},
        {"role": "code", "content": "1/0"},
        {"role": "execution", "content": "ZeroDivisionError: division by zero"},
        {"role": "tool", "content": "late"},
    ]
    (first, second), texts = turns_of(messages)
    assert texts == ["", ""] and first["replies"] == [{"role": "user", "text": "And?"}]
    assert [
        (call["raw"], result["status"]) for call, result in zip(second["calls"], second["results"], strict=True)
    ] == [("1/0", "code_error")]
    assert second["replies"] == [{"role": "tool", "text": "late"}]
