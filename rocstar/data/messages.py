"""Demonstrations from OpenAI-style messages: JSONL, one conversation a line under the key `messages`.

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "content": "",
                   "tool_calls": [{"function": {"name": "python", "arguments": {"code": "print(3 * 4)"}}}]},
                  {"role": "tool", "content": "12"},
                  {"role": "assistant", "content": "<answer>\\boxed{12}</answer>"}]}

One user message first, then assistant and tool messages in turn, an assistant message last."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocstar.dialogue.calls import parse_calls, render_call
from rocstar.errors import DataError
from rocstar.types import Demonstration, DemoTurn, Problem, Status, ToolResult, problem_id


def load_demonstrations(path: Path, tool_name: str) -> list[Demonstration]:
    """All conversations of a file. `tool_name` stands in where a call names no tool. Raises DataError naming file, line
    and field."""
    rows = [_demonstration(row, f"{path}:{number}", tool_name) for number, row in _rows(path)]
    if not rows:
        raise DataError(f"{path} holds no conversation")
    return rows


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _json(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _json(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from None


def _demonstration(row: Any, place: str, tool_name: str) -> Demonstration:
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list) or len(messages) < 2:
        raise DataError(f"{place} field messages: expected a list of at least two messages")
    question = _content(messages[0], place, "user")
    turns: list[DemoTurn] = []
    for message in messages[1:]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool" and turns:
            turns[-1] = _answered(turns[-1], _content(message, place, "tool"))
        else:
            turns.append(DemoTurn(text=_assistant(message, place, tool_name)))
    if turns[-1].results:
        raise DataError(f"{place} field messages: the last message must be the assistant's")
    for turn in turns:
        calls = len(parse_calls(turn.text))
        if calls != len(turn.results):
            raise DataError(
                f"{place} field messages: an assistant message with {calls} tool calls is followed by "
                f"{len(turn.results)} tool messages; give each call its own"
            )
    problem = Problem(id=problem_id(question), question=question, answer="", source=place.rsplit(":", 1)[0])
    return Demonstration(problem=problem, turns=tuple(turns))


def _content(message: Any, place: str, role: str) -> str:
    if not isinstance(message, Mapping) or message.get("role") != role or not isinstance(message.get("content"), str):
        raise DataError(f"{place} field messages: expected a message of role {role} with text content")
    return str(message["content"])


def _assistant(message: Any, place: str, tool_name: str) -> str:
    calls = message.get("tool_calls") or [] if isinstance(message, Mapping) else []
    if not isinstance(calls, list):
        raise DataError(f"{place} field tool_calls: expected a list")
    if calls and message.get("content") is None:
        message = {**message, "content": ""}
    text = _content(message, place, "assistant")
    rendered = [_call(call, place, tool_name) for call in calls]
    return "\n".join(part for part in (text, *rendered) if part)


def _call(call: Any, place: str, tool_name: str) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{place} field tool_calls")
    if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
        raise DataError(f"{place} field tool_calls: expected function.name and function.arguments")
    return render_call(str(function.get("name") or tool_name), arguments)


def _answered(turn: DemoTurn, content: str) -> DemoTurn:
    result = ToolResult(call_id=f"call_{len(turn.results)}", status=Status.OK, stdout=content)
    return DemoTurn(text=turn.text, results=(*turn.results, result))
