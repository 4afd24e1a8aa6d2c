"""The attempts that an analysis reads, from rollout files and evaluations, in batches: never all of them in memory.

Not here: transcripts from elsewhere (messages.py), and what is made of attempts (tally.py, tokens.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocstar.errors import DataError
from rocstar.record.call_errors import error_of_result
from rocstar.types import Verdict

BATCH_ROWS = 256  # of a parquet file at once: 256 attempts of 30,000 tokens are some 100 MB
READ_BYTES = 1 << 20  # of a column at once; without it, a step's whole column is read, compressed, however long
PLAIN = ("step", "problem_id", "verdict", "stop", "fault", "response_tokens", "turns", "reason", "penalty_total")
TOKENS = ("prompt_ids", "token_ids", "loss_mask", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """One tool call of an attempt."""

    turn: int
    """Which completion it stands in, from 0."""
    text: str
    """What was asked: the program, or the arguments as JSON."""
    error: str | None
    """Class of its failure (errors.py); None where it did not fail."""


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
    step: int
    """Of the run; 0 for transcripts from elsewhere."""
    problem: str
    """Names the problem."""
    right: bool | None
    """The verdict, not right where the verifier left it open; None where there is none."""
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
    """Attempts of one parquet file, in order; those that a fault of ours ended are left out.

    tokens: also read token ids and entropies. Raises DataError for a file that is no rollout file."""
    from pyarrow import ArrowException, parquet

    columns = [*PLAIN, *TOKENS] if tokens else [*PLAIN]
    try:
        for batch in parquet.ParquetFile(file, buffer_size=READ_BYTES).iter_batches(BATCH_ROWS, columns=columns):
            yield from (attempt_of(row) for row in batch.to_pylist() if row["fault"] is None)
    except (ArrowException, KeyError, ValueError) as error:
        raise DataError(f"{file} is not a file of attempts: {str(error).splitlines()[0]}") from None


def attempt_of(row: Mapping[str, Any]) -> Attempt:
    """One row of `rocstar.record.rollouts.COLUMNS`."""
    turns = json.loads(row["turns"])
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
            CallFacts(turn=number, text=text_of_call(call), error=error_of_result(result, call["parse_error"]))
            for number, turn in enumerate(turns)
            for call, result in zip(turn["calls"], turn["results"], strict=False)
        ),
        turns=_turns(turns, len(row["prompt_ids"])) if "token_ids" in row else (),
        token_ids=row.get("token_ids") or (),
        entropies=row.get("entropies"),
    )


def text_of_call(call: Mapping[str, Any]) -> str:
    """The program where there is one, else all arguments, else what the model wrote."""
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
