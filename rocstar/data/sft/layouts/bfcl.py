"""BFCL: questions with their functions, and answers in files of their own, joined by `id`.

    question      [[{"role": "user", "content": "..."}]]          turns of messages
    function      [{"name": "f", "parameters": {"type": "dict", ...}}]
    ground_truth  [{"f": {"x": [1, 1.0], "unit": ["m", ""]}}]     values that are accepted; "" means left out

The first accepted value is taken. BFCL is a benchmark: build it to measure with, not to train on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rocstar.data.sft.format import Conversation, FunctionCall, Role, message_of, tools_of
from rocstar.data.sft.layouts.base import (
    Layout,
    Row,
    Surroundings,
    Turns,
    companion_rows,
    each,
    list_of,
    mapping_of,
    text_of,
)
from rocstar.data.sft.refusal import Reason, Refused

LEFT_OUT = ""
_NOTHING = object()


def bfcl(around: Surroundings) -> Layout:
    answers = {text_of(row, "id"): list_of(row, "ground_truth") for row in companion_rows(around.answer_files)}
    return each(lambda row: _conversation(row, answers))


def _conversation(row: Row, answers: Mapping[str, list[Any]]) -> Conversation:
    asked = list_of(row, "question")
    if len(asked) != 1 or not isinstance(asked[0], list):
        raise Refused(Reason.NO_RESULT, "question", f"{len(asked)} turns of calls, and no results of any")
    tools = tools_of(list_of(row, "function"), "function")
    truth = answers.get(text_of(row, "id"))
    if not truth:
        raise Refused(Reason.NO_ANSWER, "id", f"no answer file answers {row['id']!r}")
    turns = Turns()
    for message in asked[0]:
        read = message_of(message)
        turns.add(Role(read.role), read.content)
    turns.calls([call for answer in truth for call in _calls(answer)])
    return turns.conversation(tools)


def _calls(answer: Any) -> Iterable[FunctionCall]:
    for name, options in mapping_of(answer, "ground_truth").items():
        chosen = {key: _first(accepted) for key, accepted in mapping_of(options, "ground_truth").items()}
        yield FunctionCall(name=name, arguments={key: value for key, value in chosen.items() if value is not _NOTHING})


def _first(accepted: Any) -> Any:
    """The first accepted value; `_NOTHING` where the argument is best left out."""
    if not isinstance(accepted, list) or not accepted:
        raise Refused(Reason.LAYOUT, "ground_truth", f"expected a list of accepted values, got {str(accepted)[:40]}")
    return _NOTHING if accepted[0] == LEFT_OUT else _plain(accepted[0])


def _plain(value: Any) -> Any:
    """Inside an object each field lists accepted values again; a list of objects holds such objects."""
    if isinstance(value, dict):
        chosen = {key: _first(inner) if isinstance(inner, list) else inner for key, inner in value.items()}
        return {key: inner for key, inner in chosen.items() if inner is not _NOTHING}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
