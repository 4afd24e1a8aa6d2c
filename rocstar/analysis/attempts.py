r"""The attempts that an analysis reads, in batches and never all of them in memory: from rollout files and evaluations,
and from transcripts of other programs, one JSON object a line, plain or gzip, with a list of messages.

    {"messages": [
        {"role": "user", "content": "..."},
        {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": "{\"code\": \"1/0\"}"}}]},
        {"role": "tool", "content": "..."}]}

is OpenAI's form. Two more are read, because published transcripts have them: the roles `text`, `code` and `execution`
(MathCoder), and one text with ```python and ```output blocks (ToRA). `right`, `is_correct` or `correct` beside them is
the verdict. Whether a call failed is read from the form of the reply (record/call_errors.py); tokens are not known.

Not here: statistics of attempts (tally.py, tokens.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.record.call_errors import calls_of, error_of_output
from rocstar.record.messages import RESULTS, turns_of
from rocstar.record.rollouts import SHORT_COLUMNS, attempt_rows
from rocstar.types import Verdict

TOKENS = ("prompt_ids", "token_ids", "loss_mask", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """One tool call of an attempt."""

    turn: int
    """Number of its completion, from 0."""
    text: str
    """The program, or the arguments as JSON."""
    error: str | None
    """Class of its failure (record/call_errors.py); None if it did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """The tokens of one completion, by their places in the attempt's tokens."""

    start: int
    end: int
    """The place after its last token."""
    after: str | None
    """How the tool calls before it ended: "ok", "error" (one of them failed), None for the first completion."""
    ended: bool = False
    """Whether its last token is the one that ends a completion; a limit leaves none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a run, an evaluation or a transcript, with what analyses look at."""

    step: int
    """The step of the run; 0 for transcripts from elsewhere."""
    problem: str
    """Names the problem."""
    right: bool | None
    """The verdict; not right if the verifier left it undecided; None if there is none."""
    cut: bool
    """Ended by a limit of tokens or turns."""
    tokens: int | None
    """After the prompt, tool replies included; None where they were not counted."""
    calls: tuple[CallFacts, ...]
    """All of them, in order."""
    undecided: bool = False
    """The verifier left it open."""
    reason: str | None = None
    """Why the resampler kept or dropped it; None where none chose."""
    penalty: float | None = None
    """RoC's total penalty."""
    turns: tuple[TurnSpan, ...] = ()
    """Empty where the tokens were not read."""
    token_ids: Sequence[int] = ()
    """[T] prompt, completions and replies; empty where they were not read."""
    entropies: Sequence[float] | None = None
    """[T] nats, 0 where the policy wrote nothing; None where there are none."""


def read_attempts(file: Path, *, tokens: bool) -> Iterator[Attempt]:
    """Attempts of one parquet file, in order; those ended by a service failure are skipped.

    tokens: also read token ids and entropies. Raises DataError for a file that is not a rollout file."""
    rows = attempt_rows(file, [*SHORT_COLUMNS, *TOKENS] if tokens else SHORT_COLUMNS)
    return (attempt_of(row) for row in rows if row["fault"] is None)


def attempt_of(row: Mapping[str, Any]) -> Attempt:
    """The analysed facts of a recorded row."""
    turns = row["turns"]
    return Attempt(
        step=row["step"],
        problem=row["problem_id"],
        right=None if row["verdict"] is None else row["verdict"] == Verdict.RIGHT,
        undecided=row["verdict"] == Verdict.UNDECIDED,
        reason=row["reason"],
        penalty=row["penalty_total"],
        cut=row["stop"] in ("max_tokens", "max_turns"),
        tokens=row["response_tokens"],
        calls=tuple(
            CallFacts(turn=number, text=text_of_call(call), error=error)
            for number, call, result, error in calls_of(turns)
            if result is not None
        ),
        turns=_turns(turns, len(row["prompt_ids"])) if "token_ids" in row else (),
        token_ids=row.get("token_ids") or (),
        entropies=row.get("entropies"),
    )


def text_of_call(call: Mapping[str, Any]) -> str:
    """The program if there is one, else all arguments, else the model's text."""
    arguments = call.get("arguments")
    if not arguments:
        return str(call.get("raw", ""))
    code = arguments.get("code") if isinstance(arguments, Mapping) else None
    return code if isinstance(code, str) else json.dumps(arguments, sort_keys=True)


def _turns(turns: Sequence[Mapping[str, Any]], start: int) -> tuple[TurnSpan, ...]:
    found, after = [], None
    for turn in turns:
        end = start + turn["sampled_tokens"]
        found.append(TurnSpan(start=start, end=end, after=after, ended=turn["finish"] == "stop"))
        start = end + turn["reply_tokens"]
        after = "error" if any(result["status"] != "ok" for result in turn["results"]) else "ok"
    return tuple(found)


# Transcripts from elsewhere

MESSAGES = ("messages", "conversation", "debug_result")  # names of the list; the last one that has replies is read
TEXTS = ("code", "text", "response", "completion")  # names of one text, or of a list of texts, one an attempt
VERDICTS = ("right", "is_correct", "correct")
_BLOCKS = re.compile(r"```python\n(.*?)\n?```(?:\s*```output\n(.*?)\n?```)?", re.DOTALL)

Step = tuple[int, str, str | None]
"""(number of the turn, the call, why it failed)"""


def read_transcripts(file: Path) -> Iterator[Attempt]:
    """Attempts of a file, in order. Raises DataError for a line that is not a transcript."""
    for line, row in read_rows(str(file)):
        try:
            attempts_read = list(_steps_by_attempt(row))
        except (DataError, AttributeError, RecursionError, TypeError) as error:
            raise DataError(f"{file} line {line} holds messages of another shape: {error!s:.200}") from error
        if not attempts_read:
            raise DataError(
                f"{file} line {line} is not a transcript: give a list of messages ({', '.join(MESSAGES)}) or a text "
                f"({', '.join(TEXTS)}) with ```python blocks; a program with only its result is not enough: "
                "without the tool's reply the cause of a failure is unknown"
            )
        for steps in attempts_read:
            yield _attempt(f"line {line}", steps, row)


def _steps_by_attempt(row: Mapping[str, Any]) -> Iterator[list[Step]]:
    """The tool calls of each attempt that a row holds."""
    lists = [row[name] for name in MESSAGES if _is_messages(row.get(name))]
    if lists:
        turns, _ = turns_of(max(lists, key=lambda one: sum(message["role"] in RESULTS for message in one)))
        yield [(number, text_of_call(call), error) for number, call, result, error in calls_of(turns) if result]
        return
    for name in TEXTS:
        texts = row.get(name)
        for text in [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []:
            blocks = enumerate(_BLOCKS.finditer(str(text)))
            yield [(place, block[1], error_of_output(block[2])) for place, block in blocks if block[2] is not None]
        if texts:
            return


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _attempt(name: str, steps: Sequence[Step], row: Mapping[str, Any]) -> Attempt:
    turns = {place: number for number, place in enumerate(sorted({place for place, _, _ in steps}))}
    verdict = next((row[key] for key in VERDICTS if isinstance(row.get(key), bool)), None)
    return Attempt(
        step=0,
        problem=name,
        right=verdict,
        cut=False,
        tokens=None,
        calls=tuple(CallFacts(turn=turns[place], text=call, error=error) for place, call, error in steps),
    )
