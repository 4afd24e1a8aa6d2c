"""Transcripts in each form that is read, line by line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.analysis.attempts import Attempt, read_transcripts
from rocstar.errors import DataError


def read(folder: Path, *rows: Any) -> list[Attempt]:
    file = folder / "a.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return list(read_transcripts(file))


def asks(*codes: str) -> dict[str, Any]:
    calls = [{"function": {"name": "python", "arguments": json.dumps({"code": code})}} for code in codes]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def replies(text: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def test_calls_in_openai_messages_get_their_replies_in_order(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "ValueError: no"}]
    messages = [{"role": "user", "content": "?"}, asks("a", "b"), replies("1"), replies(parts), asks("c"), replies("2")]
    (attempt,) = read(tmp_path, {"messages": messages, "is_correct": True})
    assert [(call.turn, call.text, call.error) for call in attempt.calls] == [
        (0, "a", None),
        (0, "b", "ValueError"),
        (1, "c", None),
    ]
    assert attempt.right is True and attempt.problem == "line 1"


NO_JSON = {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": "print(1"}}]}


@pytest.mark.parametrize(
    ("messages", "errors"),
    [
        ([asks("a"), replies(5)], [None]),
        ([{**asks("a"), "content": [{"type": "reasoning", "summary": []}]}, replies("NameError: a")], ["NameError"]),
        ([NO_JSON, replies("SyntaxError: never closed")], ["SyntaxError"]),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, replies("")], [None]),
        ([{"role": "system", "content": [{"type": "text"}]}, asks("a"), replies("1")], [None]),
        ([asks("a"), {**replies("boom"), "error": "yes"}], [None]),
        ([asks("a"), {"role": "assistant", "content": "let me see"}, replies("ValueError: x")], ["ValueError"]),
        ([asks("a"), replies([{"text": "NameError:"}, {"text": " no"}])], ["NameError"]),
    ],
)
def test_unusual_messages_lose_no_call_and_no_error(tmp_path: Path, messages: Any, errors: Any) -> None:
    (attempt,) = read(tmp_path, {"messages": messages})
    assert [call.error for call in attempt.calls] == errors


def test_a_call_without_a_reply_is_none(tmp_path: Path) -> None:
    (attempt,) = read(tmp_path, {"messages": [{"role": "user", "content": "?"}, asks("a")]})
    assert attempt.calls == () and attempt.right is None


def test_roles_of_text_code_and_execution_are_read(tmp_path: Path) -> None:
    told = [{"role": role, "content": role} for role in ("user", "text", "code", "execution", "code", "execution")]
    row = {"messages": [{"role": "user", "content": "?"}], "debug_result": told}
    (attempt,) = read(tmp_path, row)
    assert [call.turn for call in attempt.calls] == [0, 1]


def test_every_text_of_a_row_with_fenced_blocks_is_an_attempt(tmp_path: Path) -> None:
    text = "```python\nprint(1)\n```\n```output\n1\n```\nNow\n```python\nnever run\n```"
    first, second = read(tmp_path, {"code": [text, "no program"]})
    assert [call.text for call in first.calls] == ["print(1)"]
    assert second.calls == ()


def test_a_row_that_is_no_transcript_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 is not a transcript"):
        read(tmp_path, {"messages": [{"role": "user", "content": "?"}]}, {"question": "?"})


def test_programs_beside_nothing_but_their_results_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without the tool's reply"):
        read(tmp_path, {"question": "?", "generated": "ans = 1 / 0", "executed": None, "answer": 3.0})


def test_a_message_of_another_shape_names_its_line(tmp_path: Path) -> None:
    asked = {"role": "assistant", "tool_calls": ["print(1)"]}
    with pytest.raises(DataError, match=r"line 2 holds messages of another shape: .*no JSON"):
        read(tmp_path, {"messages": [asks("a")]}, {"messages": [asked, replies("1")]})
