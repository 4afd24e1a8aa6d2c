"""Each class of failure, from what a sandbox recorded and from the text of a reply alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rocstar.record.call_errors import error_of_output, error_of_result

NOTEBOOK = "-" * 75 + " NameError     Traceback (most recent call last) Cell In[1], line 2\n----> 2 x\n NameError: x"
LATE = "-" * 75 + " Timeout waiting for reply                                Traceback (most recent call last)"
PLAIN = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nsympy.core.SympifyError: no\n'
CHAINED = f"{PLAIN}\nDuring handling of it, another:\n\nTraceback (most recent call last):\n  File\nKeyError: 'a'"
JUDGED = Path(__file__).with_name("trace_errors_judged.jsonl")


def result(status: str, stderr: str = "") -> dict[str, Any]:
    return {"status": status, "stderr": stderr}


@pytest.mark.parametrize(
    ("status", "stderr", "parse_error", "expected"),
    [
        ("ok", "ValueError: printed", None, None),
        ("code_error", '  File "<program>", line 3\n    print a\nSyntaxError: no parentheses\n', None, "SyntaxError"),
        ("code_error", PLAIN, None, "SympifyError"),
        ("code_error", CHAINED, None, "KeyError"),
        ("code_error", "sorry\nthe program exited with status 3\n", None, "exit status"),
        ("code_error", "the program was killed by SIGSEGV\n", None, "killed by a signal"),
        ("timeout", "", None, "timeout"),
        ("memory_limit", "MemoryError\n", None, "memory limit"),
        ("output_limit", "", None, "output limit"),
        ("bad_call", "Failed", "Failed to decode tool call: no </tool_call> after <tool_call>", "call: not closed"),
        ("bad_call", "Failed", "Failed to decode tool call: Expecting value: line 1", "call: not JSON"),
        ("bad_call", "there is no tool named 'x'; the tools are: python", None, "call: no such tool"),
        ("bad_call", "only 4 tool calls are run in one turn", None, "call: too many"),
        ("bad_call", "argument 'code' is missing", None, "call: arguments"),
    ],
)
def test_what_the_sandbox_recorded_decides(status: str, stderr: str, parse_error: str, expected: str | None) -> None:
    assert error_of_result(result(status, stderr), parse_error) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", None),
        ("The error is 3.", None),
        ("0 errors, 2 warnings", None),
        ("unexpected error (OperationalError('database is locked')).800.0", None),
        ("SyntaxError is a kind of Exception", None),
        (NOTEBOOK, "NameError"),
        (PLAIN, "SympifyError"),
        (CHAINED, "KeyError"),
        ("Traceback (most recent call last):\n  File", "no exception named"),
        ("Cell In[1], line 2\n    1/2 = x\n    ^\nSyntaxError: cannot assign", "SyntaxError"),
        (LATE, "timeout"),
        ("Timeout Error", "timeout"),
        ("TimeoutError", "timeout"),
        ("timed out", "timeout"),
        ("the match was in time out of 5", None),
    ],
)
def test_a_reply_alone_shows_a_failure_by_its_form_only(reply: str, expected: str | None) -> None:
    assert error_of_output(reply) == expected


def test_calls_of_published_transcripts_are_classed_as_a_reader_classed_them() -> None:
    """150 calls in three draws. The rules were written on other files. Draw 1 was read before the rule knew a
    notebook's "Timeout waiting for reply" (35 of 50 agreed), draw 2 after it, and draw 3 (35 replies with a word such
    as "error" or "time", 15 others) before any verdict on it was seen."""
    data = os.environ.get("ROCSTAR_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
    folder = Path(data) / "traces"
    if not folder.is_dir():
        pytest.skip(f"no transcripts in {folder}")
    from rocstar.analysis.attempts import read_transcripts

    rows = [json.loads(line) for line in JUDGED.read_text().splitlines()]
    found = {
        f"{name}:{attempt.problem.removeprefix('line ')}:0:{number}": call.error or "none"
        for name in sorted({row["id"].partition(":")[0] for row in rows})
        for attempt in read_transcripts(folder / name)
        for number, call in enumerate(attempt.calls)
    }
    assert len(rows) == 150
    assert [row for row in rows if found[row["id"]] != row["judged"]] == []
