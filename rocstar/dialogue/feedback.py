"""Formats tool results for the model: which streams it sees, the form of errors, the cut of long text."""

from __future__ import annotations

from typing import Literal

from rocstar.types import Status, ToolResult, utf8

Truncate = Literal["left", "right", "middle"]
Errors = Literal["short", "full"]

MARKER = "...(truncated)..."
"""Marks a cut."""


def feedback_text(result: ToolResult, *, max_chars: int, truncate: Truncate, errors: Errors) -> str:
    """The text of a result for the model, at most max_chars + len(MARKER) characters.

    Success: standard output, then the value of the last expression, if any; may be empty. Failure: `short` gives one
    line (type and message), `full` the output so far and the whole traceback. Trailing line ends are dropped. Text that
    fits in `max_chars` is untouched; for longer text see `cut`. Source: paper §2.1 for the cases, layout ours.
    """
    text = _error_text(result, errors) if result.is_error else _joined(result.stdout, result.value or "")
    return cut(utf8(text).rstrip("\n"), max_chars, truncate)


def cut(text: str, max_chars: int, truncate: Truncate) -> str:
    """Shorten `text` of more than `max_chars` characters. MARKER is added to the kept text:

    left    the first max_chars characters, MARKER
    right   MARKER, the last max_chars characters
    middle  the first max_chars // 2, MARKER, the last max_chars // 2

    Source: the release's agent loop, whose `left` also keeps the head.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    if truncate == "left":
        return text[:max_chars] + MARKER
    if truncate == "right":
        return MARKER + text[len(text) - max_chars :]
    return text[:half] + MARKER + text[len(text) - half :]


def _error_text(result: ToolResult, errors: Errors) -> str:
    message = _limit_message(result)
    if errors == "full":
        return _joined(result.stdout, result.stderr, message)
    return message or result.stderr.strip().rsplit("\n", 1)[-1].strip()


def _limit_message(result: ToolResult) -> str:
    """Our own line if the program could not report its failure; empty if its standard error does."""
    if result.status is Status.TIMEOUT:
        return "TimeoutError: the program ran too long"  # no seconds: a repeated run must see the same tokens
    if result.status is Status.MEMORY_LIMIT:
        return "MemoryError: the program used too much memory"
    if result.status is Status.OUTPUT_LIMIT:
        return "OutputError: the program printed too much"
    return "" if result.stderr.strip() else "Error: the program failed without a message"


def _joined(*parts: str) -> str:
    """The parts that are not empty, each beginning on a new line."""
    return "\n".join(part.rstrip("\n") for part in parts if part)
