"""Attempts as chat messages, and written for other tools, one attempt at a time.

messages   JSONL: `messages` in OpenAI's form, and the facts of the attempt beside them
trl        JSONL: `prompt` and `completion` as lists of messages, TRL's conversational prompt-completion form
csv        the facts without the texts
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.marked_calls import FINAL, without_channels, without_end
from rocstar.errors import DataError, naming
from rocstar.record.atomic import NEW, plain
from rocstar.record.rollouts import result_of
from rocstar.types import ToolResult

FACTS = (
    *("step", "problem_id", "index", "source", "gold", "extracted", "verdict", "method", "reward", "kept", "reason"),
    *("weight", "penalty_errors", "penalty_format", "advantage", "stop", "fault", "response_tokens", "calls"),
    *("failed_calls", "seconds", "tool_seconds", "policy_version", "reward_parts"),
)
Row = Mapping[str, Any]
Message = dict[str, Any]
Feedback = Callable[[ToolResult], str]
"""A tool result -> its text for the model."""


def feedback_of(settings: Mapping[str, Any]) -> Feedback:
    """How tool results became text for the model, from a run's settings (config.resolved.json) or an evaluation's
    `setup`.

    Raises DataError if the settings are missing."""
    section = settings.get("feedback") or settings.get("rollout") or {}
    try:
        chars, cut, errors = (section[f"feedback_{key}"] for key in ("max_chars", "truncate", "errors"))
    except KeyError as error:
        raise DataError(f"its settings lack {error.args[0]}, so what the model read of a tool is unknown") from None
    return lambda result: feedback_text(result, max_chars=chars, truncate=cut, errors=errors)


def own_messages(row: Mapping[str, Any]) -> list[Message]:
    """The messages before the first completion, as far as they are the problem's own and not the template's."""
    return row.get("prompt_messages") or [{"role": "user", "content": row["question"]}]


def structured(row: Mapping[str, Any], feedback: Feedback) -> list[Message]:
    """OpenAI's form: calls as `tool_calls`, each answered by a message of role `tool`. A call that did not parse stays
    in the text as written, with the rest of its turn."""
    messages = [*own_messages(row)]
    for text, turn in zip(row["text"], row["turns"], strict=True):
        messages += [*_begun(turn), _assistant(text, turn)]
        for result in turn["results"]:
            shown = feedback(result_of(result))
            messages.append({"role": "tool", "tool_call_id": result["call_id"], "content": shown})
    return messages


def as_written(row: Mapping[str, Any], feedback: Feedback) -> list[Message]:
    """Every turn as the policy wrote it, calls with their tags; for templates that insert content verbatim."""
    messages = [*own_messages(row)]
    for text, turn in zip(row["text"], row["turns"], strict=True):
        messages += [*_begun(turn), {"role": "assistant", "content": without_end(text)}]
        messages += [{"role": "tool", "content": feedback(result_of(result))} for result in turn["results"]]
    return messages


def _begun(turn: Mapping[str, Any]) -> list[Message]:
    """A message before a turn that begins another conversation of an agent."""
    if not (tokens := turn.get("prompt_tokens")):
        return []
    return [{"role": "agent", "content": f"(another conversation begins here, with a prompt of {tokens} tokens)"}]


def whole(row: Row) -> Row:
    """The row. Raises DataError if its attempt has several conversations, which do not form one list of messages."""
    if any(map(_begun, row["turns"])):
        raise DataError(
            f"attempt {row['problem_id']} #{row['index']} of step {row['step']} has several conversations "
            "(rollout.agent), which do not form one list of messages; export csv"
        )
    return row


def _assistant(text: str, turn: Mapping[str, Any]) -> Message:
    calls = turn["calls"]
    if not calls or any(call["parse_error"] for call in calls):
        thought, final, answer = without_end(text).rpartition(FINAL)
        thinking = {"thinking": without_channels(thought)} if final and thought else {}
        return {"role": "assistant", "content": answer, **thinking}
    start, end = next((start, end) for start, end, call in turn["segments"] if call == 0)
    before = text[:start] if start < end else without_end(text)  # without a call in the text
    functions = [{"name": call["tool"], "arguments": json.dumps(call["arguments"])} for call in calls]
    tool_calls = [{"id": c["id"], "type": "function", "function": f} for c, f in zip(calls, functions, strict=True)]
    return {"role": "assistant", "content": without_channels(before), "tool_calls": tool_calls}


Write = Callable[[Iterable[Row], Feedback, Path], int]


def export(rows: Iterable[Row], feedback: Feedback, form: str, path: Path) -> int:
    """Write attempts to a file atomically; returns their number. Raises OSError, and KeyError for an unknown form."""
    fresh = path.with_name(f".{path.name}{NEW}")
    try:
        with naming(path):
            count = FORMS[form](rows, feedback, fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return count


def facts(row: Row) -> dict[str, Any]:
    """The facts of an attempt, without its texts."""
    return {name: row[name] for name in FACTS}


def _messages(rows: Iterable[Row], feedback: Feedback, path: Path) -> int:
    return _json_lines(({"messages": structured(whole(row), feedback), **facts(row)} for row in rows), path)


def _trl(rows: Iterable[Row], feedback: Feedback, path: Path) -> int:
    def line(row: Row) -> dict[str, Any]:
        messages, begun = structured(whole(row), feedback), len(own_messages(row))
        return {"prompt": messages[:begun], "completion": messages[begun:], **facts(row)}

    return _json_lines(map(line, rows), path)


def _json_lines(values: Iterable[Any], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for value in values:
            file.write(json.dumps(plain(value)) + "\n")
            count += 1
    return count


def _csv(rows: Iterable[Row], feedback: Feedback, path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("question", *FACTS))
        for row in rows:
            writer.writerow(map(_cell, (row["question"], *facts(row).values())))
            count += 1
    return count


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would read as a formula gets an apostrophe in front; numbers stay; objects are JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str) and re.match(r"[=+@\t\r]|-(?![0-9.]+$)", value):
        return f"'{value}"
    return value


FORMS: dict[str, Write] = {"messages": _messages, "trl": _trl, "csv": _csv}
ENDINGS = {"messages": "jsonl", "trl": "jsonl", "csv": "csv"}
