"""The attempts that an analysis reads, from rollout files and evaluations, in batches and never all of them in memory.

Not here: statistics of attempts (tally.py, tokens.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rocstar.record.call_errors import calls_of
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
    called: bool = False
    """Whether tool calls were read in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a run or an evaluation, with what analyses look at."""

    step: int
    """The step of the run."""
    problem: str
    """Names the problem."""
    right: bool | None
    """The verdict; not right if the verifier left it undecided; None if there is none."""
    cut: bool
    """Ended by a limit of tokens or turns."""
    tokens: int
    """After the prompt, tool replies included."""
    calls: tuple[CallFacts, ...]
    """All of them, in order."""
    undecided: bool = False
    """The verifier left it open."""
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
        ended, called = turn["finish"] == "stop", bool(turn["calls"])
        found.append(TurnSpan(start=start, end=end, after=after, ended=ended, called=called))
        start = end + turn["reply_tokens"]
        after = "error" if any(result["status"] != "ok" for result in turn["results"]) else "ok"
    return tuple(found)


class AfterFailure(StrEnum):
    """What a model did after a failed call. Its next call of a later turn decides, because calls of the same turn were
    written before the failure was known:

        next call            what it is
        other text, works    REPAIRED
        same text            REPEATED (white space apart), whether it works now or not
        other text, fails    FAILED_AGAIN
        none                 GAVE_UP: it went on without the tool; CUT where a limit ended the attempt
    """

    REPAIRED = "repaired"
    REPEATED = "repeated"
    FAILED_AGAIN = "failed again"
    GAVE_UP = "gave up"
    CUT = "cut"


def after_errors(attempt: Attempt) -> Iterator[tuple[str, AfterFailure]]:
    """(class of the failure, what came after) for each failed call of an attempt."""
    for place, call in enumerate(attempt.calls):
        if call.error is None:
            continue
        following = next((later for later in attempt.calls[place + 1 :] if later.turn > call.turn), None)
        if following is None:
            yield call.error, AfterFailure.CUT if attempt.cut else AfterFailure.GAVE_UP
        elif following.text.split() == call.text.split():
            yield call.error, AfterFailure.REPEATED
        else:
            yield call.error, AfterFailure.REPAIRED if following.error is None else AfterFailure.FAILED_AGAIN


def share_of(part: float, whole: float) -> float | None:
    return part / whole if whole else None
