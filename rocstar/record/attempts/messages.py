"""An attempt as the list of messages that chat formats have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rocstar.dialogue.feedback import feedback_text
from rocstar.errors import DataError
from rocstar.types import Status, ToolResult

_TURN_END = re.compile(r"(?:<\|[^|<>]*\|>\s*)+$")
_CALL_BEGIN = re.compile(r"\s*<[^<>]{1,40}>\s*$")
_HEADER = r"(?:<\|im_start\|>|<\|start_header_id\|>)(system|user|assistant|tool)(?:<\|end_header_id\|>\n)?\n"
_SENT = re.compile(_HEADER + r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>)", re.DOTALL)
_OPENED = re.compile(_HEADER + r"((?:(?!<\|im_end\|>|<\|eot_id\|>).)*)\Z", re.DOTALL)
Message = dict[str, Any]
Feedback = Callable[[ToolResult], str]


def feedback_of(settings: Mapping[str, Any]) -> Feedback:
    """What a run's settings (config.resolved.json) or an evaluation's `setup` say that the model reads of a result.

    Raises DataError where they do not say it."""
    told = settings.get("feedback") or settings.get("rollout") or {}
    try:
        chars, cut, errors = (told[f"feedback_{key}"] for key in ("max_chars", "truncate", "errors"))
    except KeyError as error:
        raise DataError(f"its settings lack {error.args[0]}, so what the model read of a tool is not known") from None
    return lambda result: feedback_text(result, max_chars=chars, truncate=cut, errors=errors)


def structured(row: Mapping[str, Any], feedback: Feedback) -> list[Message]:
    """OpenAI's form: calls as `tool_calls`, each answered by a message of role `tool`. A call that no parser took stays
    in the text as it was written, and so does all of a turn that holds one."""
    return [{"role": "user", "content": row["question"]}, *_structured(row, feedback)]


def sent(prompt: str, question: str) -> tuple[list[Message], str]:
    """The messages of a prompt in ChatML's or Llama 3's markup, and the text that the assistant's turns were opened
    with. A prompt in another markup, or with a question that holds such marks itself, is one message as it was sent."""
    found = [{"role": role, "content": content} for role, content in _SENT.findall(prompt)]
    opened = _OPENED.search(prompt)
    if found and found[-1]["content"].endswith(question) and question:
        return found, opened[2] if opened else ""
    return [{"role": "user", "content": prompt}], ""


def as_written(row: Mapping[str, Any], feedback: Feedback) -> list[Message]:
    """Every turn as the policy wrote it, calls with their tags; for templates that put content down as it is."""
    messages = [{"role": "user", "content": row["question"]}]
    for text, turn in zip(row["text"], row["turns"], strict=True):
        messages.append({"role": "assistant", "content": _TURN_END.sub("", text)})
        messages += [{"role": "tool", "content": feedback(result_of(result))} for result in turn["results"]]
    return messages


def _structured(row: Mapping[str, Any], feedback: Feedback) -> Iterator[Message]:
    for text, turn in zip(row["text"], row["turns"], strict=True):
        yield _assistant(_TURN_END.sub("", text), turn["calls"])
        for result in turn["results"]:
            yield {"role": "tool", "tool_call_id": result["call_id"], "content": feedback(result_of(result))}


def _assistant(text: str, calls: list[Mapping[str, Any]]) -> Message:
    if not calls or any(call["parse_error"] for call in calls):
        return {"role": "assistant", "content": text}
    before = text.partition(calls[0]["raw"])[0]
    return {"role": "assistant", "content": _CALL_BEGIN.sub("", before), "tool_calls": [_call(call) for call in calls]}


def _call(call: Mapping[str, Any]) -> Message:
    function = {"name": call["tool"], "arguments": json.dumps(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def result_of(result: Mapping[str, Any]) -> ToolResult:
    """A tool result as rollout files keep it."""
    return ToolResult(**{**result, "status": Status(result["status"])})
