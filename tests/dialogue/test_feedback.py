from typing import Any

import pytest

from rocstar.dialogue.feedback import MARKER, cut, feedback_text
from rocstar.types import Status, ToolResult

TRACEBACK = "Traceback (most recent call last):\n  File \"<cell>\", line 1\nNameError: name 'x' is not defined\n"


def shown(status: Status, errors: Any = "short", **fields: Any) -> str:
    result = ToolResult(call_id="call_0", status=status, **fields)
    return feedback_text(result, max_chars=500, truncate="middle", errors=errors)


def test_success_shows_what_was_printed_or_else_the_value() -> None:
    assert shown(Status.OK, stdout="1\n2\n\n") == "1\n2"
    assert shown(Status.OK, value="3") == "3"
    assert shown(Status.OK, stdout="1\n", value="3") == "1\n3"
    assert shown(Status.OK, stderr="a warning") == ""


def test_a_short_error_is_the_last_line_of_the_traceback() -> None:
    assert shown(Status.CODE_ERROR, stdout="1\n", stderr=TRACEBACK) == "NameError: name 'x' is not defined"


def test_a_full_error_is_the_output_so_far_and_the_whole_traceback() -> None:
    assert shown(Status.CODE_ERROR, "full", stdout="1\n", stderr=TRACEBACK) == "1\n" + TRACEBACK.rstrip("\n")


def test_a_failure_that_left_no_message_still_reads_as_one() -> None:
    assert shown(Status.CODE_ERROR) == "Error: the program failed without a message"


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status.TIMEOUT, "TimeoutError: the program ran too long"),
        (Status.MEMORY_LIMIT, "MemoryError: the program used too much memory"),
        (Status.OUTPUT_LIMIT, "OutputError: the program printed too much"),
    ],
)
def test_a_limit_is_named_whatever_the_program_wrote(status: Status, text: str) -> None:
    fields = {"stdout": "so far\n", "stderr": "noise\n", "run_seconds": 5.034}
    assert shown(status, **fields) == text
    assert shown(status, "full", **fields) == f"so far\nnoise\n{text}"


def test_a_bad_call_is_answered_with_its_reason() -> None:
    reason = "Failed to decode tool call: Expecting value: line 1 column 1 (char 0)"
    assert shown(Status.BAD_CALL, stderr=reason) == reason
    assert shown(Status.BAD_CALL, "full", stderr=reason) == reason


def test_lone_surrogates_become_question_marks() -> None:
    assert shown(Status.OK, stdout="a\ud800b") == "a?b"


def test_cutting_keeps_the_stated_characters_and_adds_the_marker_where_a_text_does_not_fit() -> None:
    text = "123456789"
    assert cut(text, 9, "middle") == text
    assert cut(text, 7, "left") == "1234567" + MARKER
    assert cut(text, 7, "right") == MARKER + "3456789"
    assert cut(text, 7, "middle") == "123" + MARKER + "789"
