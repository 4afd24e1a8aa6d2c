"""Classes of failed tool calls: an exception's name, a limit, or an error of the call itself.

The sandbox's status decides where it is recorded. In foreign transcripts, which only have a reply's text, a failure is
recognised by the form of a traceback, never by the word "error" somewhere in the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LIMITS = {"timeout": "timeout", "memory_limit": "memory limit", "output_limit": "output limit"}
SIGNAL, EXIT = "killed by a signal", "exit status"
UNNAMED = "no exception named"
NOT_JSON, NOT_CLOSED = "call: not JSON", "call: not closed"
NO_TOOL, TOO_MANY, ARGUMENTS = "call: no such tool", "call: too many", "call: arguments"

_TRACEBACK = "Traceback (most recent call last)"
_NOTEBOOK = re.compile(r"-{20,}\s*(\S.*?)\s+Traceback \(most recent call last\)")
_LAST_LINE = re.compile(r"\s*(?:\w+\.)*([A-Za-z_]\w*)(?::|$)")
_NAMED_ERROR = re.compile(r"\s*(?:\w+\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit)|Exception)(?::|$)")
_NAME = re.compile(r"(?:\w+\.)*([A-Za-z_]\w*)")
_TIMED_OUT = re.compile(r"\W*(?:execution )?time(?:d)?[ -]?out(?: ?error)?(?: waiting for reply)?\W*", re.IGNORECASE)


def calls_of(
    turns: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any] | None, str | None]]:
    """Each call of an attempt's recorded turns, in order: (number of its turn, the call, its result, why it failed).
    The last two are None for an unanswered call, the last one for a successful call."""
    for number, turn in enumerate(turns):
        results = [*turn["results"], *[None] * len(turn["calls"])]
        for call, result in zip(turn["calls"], results, strict=False):
            yield number, call, result, error_of_result(result, call.get("parse_error")) if result else None


def failures(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The class of each failed call of an attempt's recorded turns, in order."""
    return [error for *_, error in calls_of(turns) if error is not None]


def error_of_result(result: Mapping[str, Any], parse_error: str | None) -> str | None:
    """Class of a recorded `ToolResult` as its fields; None if the call did not fail."""
    status, stderr = result["status"], result["stderr"]
    if status == "ok":
        return None
    if status == "bad_call" and parse_error is not None:
        return NOT_CLOSED if "no </tool_call>" in parse_error else NOT_JSON
    if status == "bad_call":
        if stderr.startswith("there is no tool named"):
            return NO_TOOL
        return TOO_MANY if "tool calls are run in one turn" in stderr else ARGUMENTS
    if status in LIMITS:
        return LIMITS[status]
    last = _last_line(stderr)
    if last.startswith("the program was killed by"):
        return SIGNAL
    if last.startswith("the program exited with status"):
        return EXIT
    return exception_named(stderr) or EXIT


def error_of_output(text: str) -> str | None:
    """Class of a failure by the text of a tool's reply; None if the text does not look like a failure. A program that
    prints a last line such as `ValueError: no` can't be distinguished from one that raised it, nor its own TimeoutError
    from the sandbox's."""
    if _TIMED_OUT.fullmatch(text.strip()):
        return LIMITS["timeout"]
    found = exception_named(text)
    return LIMITS["timeout"] if found and _TIMED_OUT.fullmatch(found) else found


def exception_named(text: str) -> str | None:
    """The exception of a traceback (Python's or a notebook's), or of a last line like `NameError: name 'x' is not
    defined`; UNNAMED or a notebook's own words for a traceback that names none; None otherwise."""
    if above := _NOTEBOOK.search(text):
        name = _NAME.fullmatch(above[1])
        return name[1] if name else above[1]
    _, traceback, after = text.rpartition(_TRACEBACK)
    if traceback:
        ends = [named[1] for line in after.splitlines() if not line[:1].isspace() and (named := _LAST_LINE.match(line))]
        return ends[-1] if ends else UNNAMED
    last = _NAMED_ERROR.match(_last_line(text))
    return last[1] if last else None


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]
