from typing import Any

import pytest

from rocstar.dialogue.feedback import MARKER, cut, feedback_text
from rocstar.types import Status, ToolResult

TRACEBACK = "Traceback (most recent call last):\n  File \"<cell>\", line 1\nNameError: name 'x' is not defined\n"
REASON = "Failed to decode tool call: Expecting value: line 1 column 1 (char 0)"


def shown(status: Status, errors: Any = "short", **fields: Any) -> str:
    result = ToolResult(call_id="call_0", status=status, **fields)
    return feedback_text(result, max_chars=500, truncate="middle", errors=errors)


@pytest.mark.parametrize(
    ("status", "errors", "fields", "text"),
    [
        (Status.OK, "short", {"stdout": "1\n2\n\n"}, "1\n2"),
        (Status.OK, "short", {"value": "3"}, "3"),
        (Status.OK, "short", {"stdout": "1\n", "value": "3"}, "1\n3"),
        (Status.OK, "short", {"stderr": "a warning"}, ""),
        (Status.OK, "short", {"stdout": "a\ud800b"}, "a?b"),
        (Status.CODE_ERROR, "short", {"stdout": "1\n", "stderr": TRACEBACK}, "NameError: name 'x' is not defined"),
        (Status.CODE_ERROR, "full", {"stdout": "1\n", "stderr": TRACEBACK}, "1\n" + TRACEBACK.rstrip("\n")),
        (Status.CODE_ERROR, "short", {}, "Error: the program failed without a message"),
        (Status.BAD_CALL, "short", {"stderr": REASON}, REASON),
        (Status.BAD_CALL, "full", {"stderr": REASON}, REASON),
    ],
)
def test_a_result_is_put_into_words(status: Status, errors: str, fields: dict[str, str], text: str) -> None:
    assert shown(status, errors, **fields) == text


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


def test_cutting_keeps_the_stated_characters_and_adds_the_marker_where_a_text_does_not_fit() -> None:
    text = "123456789"
    assert cut(text, 9, "middle") == text
    assert cut(text, 7, "left") == "1234567" + MARKER
    assert cut(text, 7, "right") == MARKER + "3456789"
    assert cut(text, 7, "middle") == "123" + MARKER + "789"
