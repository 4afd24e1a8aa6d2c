r"""Transcripts from elsewhere as attempts: one JSON object a line, plain or gzip, with a list of messages.

    {"messages": [
        {"role": "user", "content": "..."},
        {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": "{\"code\": \"1/0\"}"}}]},
        {"role": "tool", "content": "..."}]}

is OpenAI's form. Two more are read, because published transcripts have them: the roles `text`, `code` and `execution`
(MathCoder), and one text with ```python and ```output blocks (ToRA). `right`, `is_correct` or `correct` beside them is
the verdict. Whether a call failed is read from the form of the reply (errors.py); tokens are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocstar.analysis.attempts import Attempt, CallFacts, text_of_call
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.record.call_errors import error_of_output

MESSAGES = ("messages", "conversation", "debug_result")  # names of the list; the last one that has replies is read
TEXTS = ("code", "text", "response", "completion")  # names of one text, or of a list of texts, one an attempt
VERDICTS = ("right", "is_correct", "correct")
ASKING = ("assistant", "code")
REPLYING = ("tool", "function", "ipython", "execution")
_BLOCKS = re.compile(r"```python\n(.*?)\n?```(?:\s*```output\n(.*?)\n?```)?", re.DOTALL)

Step = tuple[int, str, str]
"""(which message asked, what was asked, what came back)"""


def read_transcripts(file: Path) -> Iterator[Attempt]:
    """Attempts of a file, in order. Raises DataError for a line that is no transcript."""
    for line, row in read_rows(str(file)):
        told = list(_told(row))
        if not told:
            raise DataError(
                f"{file} line {line} is no transcript: it needs a list of messages ({', '.join(MESSAGES)}) or a text "
                f"({', '.join(TEXTS)}) with ```python blocks; a program beside nothing but its result is none, because "
                "nobody kept what the tool replied and so why it failed"
            )
        for steps in told:
            yield _attempt(f"line {line}", steps, row)


def _told(row: Mapping[str, Any]) -> Iterator[list[Step]]:
    """The tool calls of each attempt that a row holds."""
    lists = [row[name] for name in MESSAGES if _is_messages(row.get(name))]
    if lists:
        yield list(_of_messages(max(lists, key=lambda one: sum(message["role"] in REPLYING for message in one))))
        return
    for name in TEXTS:
        texts = row.get(name)
        for text in [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []:
            blocks = enumerate(_BLOCKS.finditer(str(text)))
            yield [(place, block[1], block[2]) for place, block in blocks if block[2] is not None]
        if texts:
            return


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _of_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Step]:
    """Calls with their replies, in order: a reply belongs to the first call before it that has none."""
    asked: list[tuple[int, str]] = []
    for place, message in enumerate(messages):
        if message["role"] in ASKING:
            asked = [(place, call) for call in _asked(message)] or asked
        elif message["role"] in REPLYING and asked:
            number, call = asked.pop(0)
            yield number, call, _text(message.get("content"))


def _asked(message: Mapping[str, Any]) -> list[str]:
    if message["role"] == "code":
        return [_text(message.get("content"))]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return [text_of_call({**call, "arguments": _decoded(call.get("arguments"))}) for call in calls]


def _decoded(arguments: Any) -> Any:
    """Arguments come as an object, or as JSON in a string."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return {"code": arguments}


def _text(content: Any) -> str:
    """Of a message: a string, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _attempt(name: str, steps: Sequence[Step], row: Mapping[str, Any]) -> Attempt:
    turns = {place: number for number, place in enumerate(sorted({place for place, _, _ in steps}))}
    verdict = next((row[key] for key in VERDICTS if isinstance(row.get(key), bool)), None)
    return Attempt(
        step=0,
        problem=name,
        right=verdict,
        cut=False,
        tokens=None,
        calls=tuple(
            CallFacts(turn=turns[place], text=call, error=error_of_output(reply)) for place, call, reply in steps
        ),
    )
