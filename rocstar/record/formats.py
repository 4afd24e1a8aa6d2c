"""Attempts as chat messages, and written for other tools, one attempt at a time.

messages   JSONL: `messages` in OpenAI's form, and the facts of the attempt beside them
trl        JSONL: `prompt` and `completion` as lists of messages, TRL's conversational prompt-completion form
verl       parquet: verl's columns `prompt`, `data_source`, `reward_model`, `extra_info`, and `messages` as written
inspect    one JSON file that inspect_ai reads as an evaluation log; the attempt's number is the epoch
csv        the facts without the texts
html       one self-contained page: no script, no network, no other file. What a model wrote
           stands in it as text; characters that steer the reader's screen are spelled out
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from math import sqrt
from pathlib import Path
from shutil import copyfileobj
from statistics import fmean, stdev
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.marked_calls import FINAL, without_channels, without_end
from rocstar.errors import DataError
from rocstar.record.atomic import NEW, plain
from rocstar.record.rollouts import result_of
from rocstar.support.exits import visible
from rocstar.types import ToolResult

FACTS = (
    *("step", "problem_id", "index", "source", "gold", "extracted", "verdict", "method", "reward", "kept", "reason"),
    *("weight", "penalty_errors", "penalty_format", "advantage", "stop", "fault", "response_tokens", "calls"),
    *("failed_calls", "seconds", "tool_seconds", "policy_version"),
)
PARQUET_ROWS = 1024  # attempts in memory at once
STOPS = {"max_tokens": "max_tokens", "max_turns": "max_tokens"}  # inspect_ai's words; all else is `stop`
GRADES = {"right": "C", "wrong": "I"}  # inspect_ai's letters; undecided is N
Row = Mapping[str, Any]
Message = dict[str, Any]
Feedback = Callable[[ToolResult], str]
"""A tool result -> its text for the model."""

_HEADER = r"(?:<\|im_start\|>|<\|start_header_id\|>)(system|user|assistant|tool)(?:<\|end_header_id\|>\n)?\n"
_SENT = re.compile(_HEADER + r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>)", re.DOTALL)
_OPENED = re.compile(_HEADER + r"((?:(?!<\|im_end\|>|<\|eot_id\|>).)*)\Z", re.DOTALL)


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


def sent(prompt: str, question: str) -> tuple[list[Message], str]:
    """The messages of a prompt in ChatML's or Llama 3's markup, and the text that opens the assistant's turns. A prompt
    in another markup, or with a question that contains such marks, is one message, unchanged."""
    found = [{"role": role, "content": content} for role, content in _SENT.findall(prompt)]
    opened = _OPENED.search(prompt)
    if found and found[-1]["content"].endswith(question) and question:
        return found, opened[2] if opened else ""
    return [{"role": "user", "content": prompt}], ""


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
            "(rollout.agent), which do not form one list of messages; export csv or html"
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


class Origin(NamedTuple):
    """The source of attempts."""

    name: str
    """The name for people: a run's, or RUN/EVALUATION@STEP."""
    model: str
    """Names the policy."""
    started: str
    """When the run was started, ISO 8601."""
    feedback: Feedback
    """Tool results as the model read them."""
    decoder: Callable[[], Callable[[Sequence[int]], str] | None] = lambda: None
    """Decodes a prompt's tokens; None if their tokenizer is gone."""
    agent: str | None = None
    """The agent that wrote the prompts; None if a template did."""


Write = Callable[[Iterable[Row], Origin, Path], int]


def export(rows: Iterable[Row], origin: Origin, form: str, path: Path) -> int:
    """Write attempts to a file atomically; returns their number. Raises OSError, and KeyError for an unknown form."""
    fresh = path.with_name(f".{path.name}{NEW}")
    try:
        count = FORMS[form](rows, origin, fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return count


def facts(row: Row) -> dict[str, Any]:
    """The facts of an attempt, without its texts."""
    return {name: row[name] for name in FACTS}


def _messages(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    return _json_lines(({"messages": structured(whole(row), origin.feedback), **facts(row)} for row in rows), path)


def _trl(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    def line(row: Row) -> dict[str, Any]:
        messages, begun = structured(whole(row), origin.feedback), len(own_messages(row))
        return {"prompt": messages[:begun], "completion": messages[begun:], **facts(row)}

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
    """A text that a spreadsheet would read as a formula gets an apostrophe in front; numbers stay."""
    if isinstance(value, str) and re.match(r"[=+@\t\r]|-(?![0-9.]+$)", value):
        return f"'{value}"
    return value


def _verl(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    messages_type = pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
    graded = pyarrow.struct([("style", text), ("ground_truth", text)])
    extra = [("index", pyarrow.int64()), ("step", pyarrow.int64()), ("problem_id", text), ("reward", pyarrow.float32())]
    schema = pyarrow.schema(
        [
            *(("data_source", text), ("ability", text), ("prompt", messages_type), ("messages", messages_type)),
            *(("reward_model", graded), ("extra_info", pyarrow.struct(extra))),
        ]
    )
    count, rest = 0, iter(rows)
    with path.open("wb") as raw, parquet.ParquetWriter(raw, schema) as writer:
        while some := [_verl_row(row, origin) for row in islice(rest, PARQUET_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(some, schema))
            count += len(some)
    return count


def _verl_row(row: Row, origin: Origin) -> dict[str, Any]:
    return {
        "data_source": row["source"],
        "ability": "math",
        "prompt": own_messages(row),
        "messages": as_written(whole(row), origin.feedback),
        "reward_model": {"style": "rule", "ground_truth": row["gold"]},
        "extra_info": {name: row[name] for name in ("index", "step", "problem_id", "reward")},
    }


def _inspect(rows: Iterable[Row], origin: Origin, path: Path) -> int:
    """Source: the fields that inspect_ai 0.3's EvalLog has, in its JSON form, and the definition of its `accuracy` and
    `stderr`: over the means of each sample's epochs."""
    scores: dict[str, list[float]] = defaultdict(list)
    count, epochs, decode = 0, 0, origin.decoder()
    with path.open("w", encoding="utf-8") as file, TemporaryFile("w+", encoding="utf-8") as samples:
        for row in rows:
            prompt = None if decode is None else decode(row["prompt_ids"])
            sample = _sample(row, origin, prompt)
            samples.write((",\n" if count else "\n") + json.dumps(plain(sample)))
            count, epochs = count + 1, max(epochs, sample["epoch"])
            if "scores" in sample:
                scores[sample["id"]].append(float(row["verdict"] == "right"))
        head = {
            "created": origin.started,
            "task": origin.name,
            "dataset": {"name": origin.name, "samples": len(scores)},
            "model": origin.model,
            "config": {"epochs": epochs},
        }
        results = _results([fmean(some) for some in scores.values()], sum(map(len, scores.values())), count)
        whole = {"version": 2, "status": "success", "eval": head, "plan": {}, "results": results, "stats": {}}
        file.write(json.dumps(whole)[:-1] + ', "samples": [')  # last, because readers of headers stop there
        samples.seek(0)
        copyfileobj(samples, file)
        file.write("]}\n")
    return count


def _results(means: Sequence[float], scored: int, count: int) -> Message:
    error = stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0
    values = {"accuracy": fmean(means), "stderr": error} if means else {}
    score = {
        "name": "verifier",
        "scorer": "verifier",
        "reducer": "mean",
        "scored_samples": scored,
        "unscored_samples": count - scored,
        "metrics": {name: {"name": name, "value": value} for name, value in values.items()},
    }
    return {"total_samples": count, "completed_samples": scored, "scores": [score]}


def _sample(row: Row, origin: Origin, prompt: str | None) -> dict[str, Any]:
    """prompt: its text; without it, the question."""
    own = own_messages(row)
    rest = structured(whole(row), origin.feedback)[len(own) :]
    opening, opened = (own, "") if prompt is None else sent(prompt, row["question"])
    messages = [*opening, *(_inspect_message(message, opened) for message in rest)]
    nothing: Message = {"role": "assistant", "content": ""}  # for an attempt that ended before it wrote anything
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), nothing)
    stop = STOPS.get(row["stop"], "stop")
    score = {"value": GRADES.get(row["verdict"], "N"), "answer": row["extracted"], "metadata": facts(row)}
    fault = {"message": row["fault"] or "", "traceback": "", "traceback_ansi": ""}
    return {
        "id": f"{row['problem_id']}@{row['step']}",
        "epoch": row["index"] + 1,
        "input": row.get("prompt_messages") or row["question"],
        "target": row["gold"],
        "messages": messages,
        "output": {"model": origin.model, "choices": [{"message": last, "stop_reason": stop}]},
        **({"error": fault} if row["fault"] is not None else {"scores": {"verifier": score}}),
    }


def _inspect_message(message: Message, opened: str) -> Message:
    """inspect_ai's form of a message: calls with arguments as an object, results with the function's name. opened: the
    text that the template put before each of the assistant's."""
    if message["role"] == "assistant":
        message = {**message, "content": opened + message["content"]}
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
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{HEAD}<title>{text(origin.name)}</title>\n<h1>{text(origin.name)}</h1>\n")
        for row in rows:
            file.write(_attempt(row["question"], facts(row), structured(row, origin.feedback)))
            count += 1
        file.write(f"<p>{count} attempts</p></html>\n")
    return count


FORMS: dict[str, Write] = {
    "messages": _messages,
    "trl": _trl,
    "verl": _verl,
    "inspect": _inspect,
    "csv": _csv,
    "html": _html,
}
ENDINGS = {"messages": "jsonl", "trl": "jsonl", "verl": "parquet", "inspect": "json", "csv": "csv", "html": "html"}


# The page

TEXT_CHARACTERS = 200_000  # of one message, so that browsers can open the page
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .5rem; background: #8881 }
.right { color: #087443 } .wrong { color: #b42318 } .undecided { color: #888 }
.role { font-size: .8em; color: #888 } .call { border-left: 3px solid #36c } .tool { border-left: 3px solid #a60 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .85em }
dd { margin: 0; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { .right { color: #4cc38a } .wrong { color: #ff8b7f } }
"""
# The page forbids loading and running anything, in case a text ever escapes its element.
HEAD = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}</style>
"""


def text(value: Any) -> str:
    """Escape a text, so that none of it is markup."""
    return escape(visible(str(value)))


def _attempt(question: str, facts: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    verdict = facts["verdict"] or "undecided"
    head = f"step {facts['step']}, attempt {facts['index']}, {facts['reason'] or ''}: {question[:120]}"
    known = "".join(f"<dt>{text(key)}<dd>{text(value)}" for key, value in facts.items() if value is not None)
    messages_html = "".join(_message(message) for message in messages)
    return (
        f'<details><summary><b class="{text(verdict)}">{text(verdict)}</b> {text(head)}</summary>\n'
        f"{messages_html}<dl>{known}</dl></details>\n"
    )


def _message(message: Mapping[str, Any]) -> str:
    role = str(message["role"])
    said = {"thinking": message.get("thinking"), role: message["content"]}
    parts = [_block(role, label, content) for label, content in said.items() if content]
    for call in message.get("tool_calls", ()):
        parts.append(_block("call", f"calls {call['function']['name']}", _program(call["function"]["arguments"])))
    return "".join(parts)


def _program(arguments: str) -> str:
    """The program if the call holds one, else the arguments."""
    found = json.loads(arguments)
    code = found.get("code") if isinstance(found, dict) else None
    return code if isinstance(code, str) else arguments


def _block(kind: str, label: str, content: str) -> str:
    left = len(content) - TEXT_CHARACTERS
    rest = f"\n... {left} characters more" if left > 0 else ""
    body = text(content[:TEXT_CHARACTERS] + rest)
    return f'<div class="role">{text(label)}</div><pre class="{text(kind)}">{body}</pre>\n'
