"""Attempts written for other tools, one attempt at a time.

messages   JSONL: `messages` in OpenAI's form, and what became of the attempt beside them
trl        JSONL: `prompt` and `completion` as lists of messages, TRL's conversational prompt-completion form
verl       parquet: verl's columns `prompt`, `data_source`, `reward_model`, `extra_info`, and `messages` as written
inspect    one JSON file that inspect_ai reads as an evaluation log; the attempt's number is the epoch
csv        the facts without the texts
html       one page for a colleague, which loads nothing (page.py)
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rocstar.attempts.messages import Feedback, Message, as_written, structured
from rocstar.attempts.page import write_page
from rocstar.runs.atomic import NEW, plain

FACTS = (
    *("step", "problem_id", "index", "source", "gold", "extracted", "verdict", "method", "reward", "kept", "reason"),
    *("weight", "penalty_errors", "penalty_format", "advantage", "stop", "fault", "response_tokens", "calls"),
    *("failed_calls", "seconds", "tool_seconds", "policy_version"),
)
PARQUET_ROWS = 1024  # attempts that are held at once
STOPS = {"max_tokens": "max_tokens", "max_turns": "max_tokens"}  # inspect_ai's words; all else is `stop`
GRADES = {"right": "C", "wrong": "I"}  # inspect_ai's letters; undecided is N
Row = Mapping[str, Any]


class Origin(NamedTuple):
    """Where attempts come from."""

    name: str
    """As a person reads it: a run's name, or RUN/EVALUATION@STEP."""
    model: str
    """Names the policy."""
    started: str
    """When the run was started, ISO 8601."""
    feedback: Feedback
    """What the model read of a tool result."""


Write = Callable[[Iterable[Row], Origin, Path], int]


def export(rows: Iterable[Row], origin: Origin, form: str, path: Path) -> int:
    """Write attempts to a file, which is whole or not there; how many. Raises OSError and KeyError for a form that is
    not in FORMS."""
    fresh = path.with_name(f".{path.name}{NEW}")
    try:
        count = FORMS[form](rows, origin, fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return count


def facts(row: Row) -> dict[str, Any]:
    """What became of an attempt, without its texts."""
    return {name: row[name] for name in FACTS}


def _messages(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    return _json_lines(({"messages": structured(row, origin.feedback), **facts(row)} for row in rows), path)


def _trl(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    def line(row: Row) -> dict[str, Any]:
        first, *rest = structured(row, origin.feedback)
        return {"prompt": [first], "completion": rest, **facts(row)}

    return _json_lines(map(line, rows), path)


def _json_lines(values: Iterable[Any], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for value in values:
            file.write(json.dumps(plain(value)) + "\n")
            count += 1
    return count


def _csv(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("question", *FACTS))
        for row in rows:
            writer.writerow(map(_cell, (row["question"], *facts(row).values())))
            count += 1
    return count


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula begins with an apostrophe; numbers stay."""
    if isinstance(value, str) and re.match(r"[=+@\t\r]|-(?![0-9.]+$)", value):
        return f"'{value}"
    return value


def _verl(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    said = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
    graded = pyarrow.struct([("style", text), ("ground_truth", text)])
    told = [("index", pyarrow.int64()), ("step", pyarrow.int64()), ("problem_id", text), ("reward", pyarrow.float32())]
    schema = pyarrow.schema(
        [
            *(("data_source", text), ("ability", text), ("prompt", said), ("messages", said)),
            *(("reward_model", graded), ("extra_info", pyarrow.struct(told))),
        ]
    )
    count, rest = 0, iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while some := [_verl_row(row, origin) for row in islice(rest, PARQUET_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(some, schema))
            count += len(some)
    return count


def _verl_row(row: Row, origin: Origin) -> dict[str, Any]:
    return {
        "data_source": row["source"],
        "ability": "math",
        "prompt": [{"role": "user", "content": row["question"]}],
        "messages": as_written(row, origin.feedback),
        "reward_model": {"style": "rule", "ground_truth": row["gold"]},
        "extra_info": {name: row[name] for name in ("index", "step", "problem_id", "reward")},
    }


def _inspect(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    """Source: the fields that inspect_ai 0.3's EvalLog requires, in its JSON form."""
    head = {
        "version": 2,
        "status": "success",
        "eval": {
            "created": origin.started,
            "task": origin.name,
            "dataset": {"name": origin.name},
            "model": origin.model,
            "config": {},
        },
    }
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "samples": [')
        for row in rows:
            file.write(("," if count else "") + "\n" + json.dumps(plain(_sample(row, origin))))
            count += 1
        file.write("]}\n")
    return count


def _sample(row: Row, origin: Origin) -> dict[str, Any]:
    messages = [_inspect_message(message) for message in structured(row, origin.feedback)]
    nothing: Message = {"role": "assistant", "content": ""}  # of an attempt that ended before it wrote anything
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), nothing)
    stop = STOPS.get(row["stop"], "stop")
    return {
        "id": f"{row['problem_id']}@{row['step']}",
        "epoch": row["index"] + 1,
        "input": row["question"],
        "target": row["gold"],
        "messages": messages,
        "output": {"model": origin.model, "choices": [{"message": last, "stop_reason": stop}]},
        "scores": {
            "verifier": {"value": GRADES.get(row["verdict"], "N"), "answer": row["extracted"], "metadata": facts(row)}
        },
    }


def _inspect_message(message: Message) -> Message:
    """Its calls have arguments as an object, and the function's name."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": call["function"]["name"],
            "arguments": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def _html(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    with path.open("w", encoding="utf-8") as file:
        return write_page(file, origin.name, ((facts(row), structured(row, origin.feedback)) for row in rows))


FORMS: dict[str, Write] = {
    "messages": _messages,
    "trl": _trl,
    "verl": _verl,
    "inspect": _inspect,
    "csv": _csv,
    "html": _html,
}
ENDINGS = {"messages": "jsonl", "trl": "jsonl", "verl": "parquet", "inspect": "json", "csv": "csv", "html": "html"}
