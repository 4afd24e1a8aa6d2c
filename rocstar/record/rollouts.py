"""The record of an attempt: one row of a parquet file with every attempt of a step or an evaluation.

`COLUMNS` is the schema of version 2; docs/run-folder.md explains each column. All readers of attempts use this file, or
table.py with DuckDB, and get rows of version 2: `decoded` converts rows of older files. pyarrow is imported when a file
is written or read.

Not here: which attempts fit a filter (table.py), why a call failed (call_errors.py), other tools' forms (formats.py).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rocstar.dialogue.marked_calls import OPENINGS, without_end
from rocstar.errors import DataError, first_line
from rocstar.record.atomic import plain, whole_file, write_atomic
from rocstar.record.folder import RunFolder
from rocstar.types import (
    Choice,
    Completion,
    Finish,
    FormatFacts,
    Outcome,
    Problem,
    Reason,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
    utf8,
)

if TYPE_CHECKING:
    import pyarrow.parquet

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept."""

VERSION = 2
"""The version of the file format. Turns have no `segments` in files of version 1."""
ROW_GROUP_TOKENS = 1 << 20  # some 5 MB of a file: one attempt is read in 20 ms, and the footer stays small
BATCH_ROWS = 256  # read at once: 256 attempts of 30,000 tokens are some 100 MB
READ_BYTES = 1 << 20  # of a column at once; without it, a step's whole compressed column is read

COLUMNS = {
    "step": "int64",
    "problem_id": "string",
    "question": "string",
    "prompt_messages": "string",
    "gold": "string",
    "source": "string",
    "index": "int32",
    "prompt_ids": "list<int32>",
    "token_ids": "list<int32>",
    "loss_mask": "list<bool>",
    "sampled_logprobs": "list<float>",
    "entropies": "list<float>",
    "old_logprobs": "list<float>",
    "turns": "string",
    "text": "list<string>",
    "verdict": "string",
    "reward": "double",  # as the verifier gave it: a replay learns from this number
    "reward_parts": "string",
    "extracted": "string",
    "method": "string",
    "format_facts": "string",
    "penalty_errors": "float",
    "penalty_format": "float",
    "penalty_total": "float",
    "kept": "bool",
    "reason": "string",
    "weight": "float",
    "advantage": "float",
    "stop": "string",
    "fault": "string",
    "response_tokens": "int32",
    "calls": "int32",
    "failed_calls": "int32",
    "seconds": "float",
    "tool_seconds": "float",
    "policy_version": "int64",
}
TOKEN_COLUMNS = tuple(name for name, kind in COLUMNS.items() if kind.startswith("list<") and name != "text")
"""One value for each token."""
SHORT_COLUMNS = tuple(name for name in COLUMNS if name not in (*TOKEN_COLUMNS, "text"))
"""All columns except those that grow with the attempt's length, `turns` included: enough without tokens and text."""
_REPEATED = [
    f"{name}.list.element" if kind.startswith("list<") else name
    for name, kind in COLUMNS.items()
    if kind != "list<float>"
]  # a dictionary of numbers that differ takes a quarter more than they do
LATER_COLUMNS = ("old_logprobs", "format_facts", "prompt_messages", "reward_parts")
"""Missing in older files; `attempt_rows` reads None."""
Row = dict[str, Any]
"""One attempt, as returned by `decoded`."""

_OPENS = "|".join(map(re.escape, OPENINGS))
_CALL_OPENS = re.compile(rf"(?:(?:{_OPENS})\s*)?<[^<>]{{1,40}}>\Z|(?:{_OPENS})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt of a step with the resampler's decision."""

    problem: Problem
    trajectory: Trajectory
    choice: Choice | None = None
    """The resampler's choice; None for an attempt of an evaluation."""
    advantage: float | None = None
    """The advantage in the step's update; None for an attempt that it did not learn from."""
    policy_version: int
    """The version of the weights that learnt from the step; they also wrote it unless attempts are made ahead."""
    entropies: Sequence[float] | None = None
    """[T] nats of the next-token distribution, 0.0 where the policy wrote nothing; None when not kept."""
    old_logprobs: Sequence[float] | None = None
    """[T] the learner's own logprobs before the step's first update, 0.0 likewise; None when not kept."""

    @property
    def reason(self) -> Reason | None:
        """The choice's reason, else the trajectory's own; None if there is neither."""
        if self.choice:
            return self.choice.reason
        if self.trajectory.stop is Stop.ENVIRONMENT_FAILED:
            return Reason.DROPPED_ENVIRONMENT
        undecided = self.trajectory.outcome and self.trajectory.outcome.verdict is Verdict.UNDECIDED
        return Reason.DROPPED_UNDECIDED if undecided else None


def write_attempts(path: Path, step: int, attempts: Sequence[AttemptRecord], decode: Decode | None) -> None:
    """Write one parquet file of attempts (of a step, or of an evaluation), a row group in memory at a time. A row group
    holds about ROW_GROUP_TOKENS tokens, so that one attempt can be read without all the others. Raises OSError."""
    from pyarrow import parquet

    with (
        whole_file(path) as file,
        parquet.ParquetWriter(file, attempts_schema(), compression="zstd", use_dictionary=_REPEATED) as writer,
    ):
        for some in in_row_groups(attempts):
            writer.write_table(attempts_table(step, some, decode))


def in_row_groups(attempts: Sequence[AttemptRecord]) -> Iterator[Sequence[AttemptRecord]]:
    """The attempts, in order, in parts of about ROW_GROUP_TOKENS tokens."""
    begin = tokens = 0
    for place, attempt in enumerate(attempts, start=1):
        tokens += len(attempt.trajectory.token_ids)
        if tokens >= ROW_GROUP_TOKENS or place == len(attempts):
            yield attempts[begin:place]
            begin, tokens = place, 0


def attempts_table(step: int, attempts: Sequence[AttemptRecord], decode: Decode | None) -> pyarrow.Table:
    """A table of `attempts_schema`."""
    import pyarrow

    rows = [_row(step, attempt, decode) for attempt in attempts]
    schema = attempts_schema()
    columns = [pyarrow.array([row[field.name] for row in rows], field.type) for field in schema]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def attempts_schema() -> Any:
    """`COLUMNS` as a pyarrow schema."""
    import pyarrow

    kinds = [(name, _arrow_type(kind)) for name, kind in COLUMNS.items()]
    return pyarrow.schema(kinds, {"schema_version": str(VERSION)})


def write_parquet(path: Path, table: Any) -> None:
    """Any table, atomically. Raises OSError."""
    import pyarrow
    from pyarrow import parquet

    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomic(path, buffer.getvalue().to_pybytes())


@contextmanager
def parquet_file(file: Path, buffer_size: int = 0) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opened here, since pyarrow opens no path that is not UTF-8. Raises OSError, ValueError."""
    from pyarrow import parquet

    with file.open("rb") as raw, parquet.ParquetFile(raw, buffer_size=buffer_size) as opened:
        yield opened


def read_table(file: Path, columns: Sequence[str] | None = None) -> pyarrow.Table:
    """One parquet file; pyarrow's own `read_table` loads its data sets for it, which takes half a CPU-second. Raises
    OSError, ValueError."""
    with parquet_file(file) as opened:
        return opened.read(columns=columns)


def read_rollouts(folder: RunFolder | Path | str, step: int) -> list[Row]:
    """The attempts of a step as rows of `COLUMNS`, decoded. Raises DataError when the step has no file."""
    return list(rows_of_step(folder if isinstance(folder, RunFolder) else RunFolder(folder), step))


def rows_of_step(run: RunFolder, step: int, columns: Sequence[str] = tuple(COLUMNS)) -> Iterator[Row]:
    """The same with some of the columns, a batch in memory at a time: 16,384 attempts of 10,000 tokens are some 25 GB
    of rows. Raises DataError likewise."""
    file = run.rollout_file(step)
    if not file.is_file():
        raise DataError(f"{file} does not exist: step {step} has no rollouts, or run.save_rollouts was off")
    yield from attempt_rows(file, columns)


def attempt_rows(file: Path, columns: Sequence[str] = tuple(COLUMNS)) -> Iterator[Row]:
    """The rows of one file with some of its columns, in order and decoded, a batch at a time. Raises DataError if the
    file does not hold attempts."""
    with _opened(file) as opened:
        absent = {*columns} - {*opened.schema_arrow.names, *LATER_COLUMNS}
        if absent:
            raise ValueError(f"it has no column {', '.join(sorted(absent))}")
        for batch in opened.iter_batches(BATCH_ROWS, columns=list(columns)):
            yield from (checked(decoded({**dict.fromkeys(columns), **row})) for row in batch.to_pylist())


def questions_of(file: Path) -> Iterator[str]:
    """The questions of a file's attempts, one for each group of siblings in a batch. Raises DataError."""
    with _opened(file) as opened:
        for batch in opened.iter_batches(columns=["question"]):
            yield from batch["question"].unique().to_pylist()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Raises DataError for a file that cannot be read, also while its rows are read."""
    from pyarrow import ArrowException

    try:
        with parquet_file(file, READ_BYTES) as opened:
            yield opened
    except MemoryError as error:  # one of pyarrow's too
        raise MemoryError(f"{file} cannot be read for lack of memory") from error
    except (ArrowException, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"{file} is not a file of attempts: {first_line(error)}") from None


def decoded(stored: Mapping[str, Any]) -> Row:
    """Convert a stored row of any version, with some of its columns, to version 2: `turns` with segments,
    what else is JSON as objects. Raises ValueError, KeyError for JSON of another form."""
    row = dict(stored)
    if "turns" in row:
        row["turns"] = json.loads(row["turns"])
    if messages := row.get("prompt_messages"):
        row["prompt_messages"] = json.loads(messages)
    if parts := row.get("reward_parts"):
        row["reward_parts"] = json.loads(parts)
    if "turns" in row and "text" in row:
        texts = [*(row["text"] or []), *[""] * len(row["turns"])]
        for turn, text in zip(row["turns"], texts, strict=False):
            turn.setdefault("segments", segments_of(text, turn["calls"]))
    if facts := row.get("format_facts"):
        row["format_facts"] = json.loads(facts)
    elif {"turns", "verdict", "penalty_format", "extracted"} <= row.keys():
        # Files from before the column of facts hold only the penalty that followed from them: `answer_tags` is a
        # number that gives the same penalty.
        penalty = 1.0 if row["penalty_format"] is None else row["penalty_format"]
        tags = 0 if penalty == 1.0 else 1 + round(penalty * len(row["turns"]))
        facts = {"answer_tags": tags, "reason_after_answer": False, "boxed": row["extracted"] is not None}
        row["format_facts"] = None if row["verdict"] is None else facts
    return row


def checked(row: Row) -> Row:
    """A decoded row of ours unchanged. Raises ValueError, KeyError, TypeError for an unknown word where there is one of
    a few, and for results of calls of another form."""
    for name, kind in (("stop", Stop), ("verdict", Verdict)):
        if row.get(name) is not None:
            kind(row[name])
    for turn in row.get("turns", ()):
        Finish(turn["finish"])
        for result in turn["results"]:
            result_of(result)
    return row


def segments_of(text: str, calls: Sequence[Mapping[str, Any]]) -> list[list[int | None]]:
    """The segments of a turn's text, in order: `[start, end, call]`, in characters; `call` is the number of the call
    there, tags included, None for other text. A call that is not in the text is empty. The template's end mark belongs
    to no segment.

        "So:\\n<tool_call>{...}</tool_call><|im_end|>"   ->   [[0, 3, None], [3, 32, 0]]
    """
    found: list[list[int | None]] = []
    at, last = 0, len(without_end(text))
    for number, call in enumerate(calls):
        raw = call.get("raw")
        start = text.find(raw, at) if raw else -1
        if start < 0:
            found.append([at, at, number])
            continue
        before = text[at:start].rstrip()
        opening = _CALL_OPENS.search(before)
        begin = at + len(before[: opening.start()].rstrip() if opening else before)
        end = start + len(raw or "")
        closing = f"</{opening[0][1:]}" if opening else ""
        if closing and text[end:].lstrip().startswith(closing):
            end = text.index(closing, end) + len(closing)
        found += [[at, begin, None], [begin, end, number]]
        at = end
    return [one for one in (*found, [at, max(at, last), None]) if one[2] is not None or one[0] != one[1]]


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a decoded row, the inverse of `_row`. Token columns may be missing: completions and replies are
    then empty."""
    places = iter(row.get("token_ids", ())[len(row.get("prompt_ids", ())) :])
    logprobs = iter(row.get("sampled_logprobs", ())[len(row.get("prompt_ids", ())) :])
    return Trajectory(
        problem_id=row["problem_id"],
        index=row["index"],
        prompt_ids=tuple(row.get("prompt_ids", ())),
        turns=tuple(_turn_of(turn, places, logprobs) for turn in row["turns"]),
        stop=Stop(row["stop"]),
        outcome=_outcome_of(row),
        fault=row["fault"],
        seconds=row["seconds"],
        tool_seconds=row["tool_seconds"],
    )


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row, without its metadata, which is not stored."""
    named = {"id": row["problem_id"], "question": row["question"], "answer": row["gold"], "source": row["source"]}
    return Problem(**named, messages=tuple(row.get("prompt_messages") or ()))


def _turn_of(turn: Mapping[str, Any], tokens: Iterator[int], logprobs: Iterator[float]) -> Turn:
    shown, sampled, replied = turn.get("prompt_tokens", 0), turn["sampled_tokens"], turn["reply_tokens"]
    prompt_ids = tuple(islice(tokens, shown))
    deque(islice(logprobs, shown), maxlen=0)  # zeros
    completion = Completion(
        token_ids=tuple(islice(tokens, sampled)),
        logprobs=tuple(islice(logprobs, sampled)),
        finish=Finish(turn["finish"]),
        version_spans=tuple(VersionSpan(*span) for span in turn["version_spans"]),
    )
    deque(islice(logprobs, replied), maxlen=0)
    return Turn(
        completion=completion,
        prompt_ids=prompt_ids,
        calls=tuple(ToolCall(**call) for call in turn["calls"]),
        results=tuple(map(result_of, turn["results"])),
        reply_ids=tuple(islice(tokens, replied)),
        engine_seconds=turn.get("engine_seconds"),
        tool_seconds=turn.get("tool_seconds"),
    )


def result_of(result: Mapping[str, Any]) -> ToolResult:
    """The tool result stored in a row of attempts."""
    return ToolResult(**{**result, "status": Status(result["status"])})


def _outcome_of(row: Mapping[str, Any]) -> Outcome | None:
    if row["verdict"] is None:
        return None
    return Outcome(
        verdict=Verdict(row["verdict"]),
        reward=row["reward"],
        extracted=row["extracted"],
        method=row["method"],
        format_facts=FormatFacts(**row["format_facts"]),
        parts=row.get("reward_parts") or {},
    )


class Tally(NamedTuple):
    """Attempts at one problem that have a verdict."""

    attempts: int = 0
    right: int = 0


def recorded_tallies(folder: RunFolder, oldest: int) -> dict[str, Tally]:
    """Count the attempts whose tokens were all written by weights of version `oldest` or newer, by problem id."""
    found: dict[str, Tally] = {}
    for file in sorted(folder.rollouts.glob("step=*.parquet"), reverse=True):
        for row in attempt_rows(file, ("problem_id", "verdict", "policy_version", "turns")):
            if row["policy_version"] < oldest:
                return found
            wrote = (version for turn in row["turns"] for version, _ in turn["version_spans"])
            if row["verdict"] in (Verdict.RIGHT, Verdict.WRONG) and min(wrote, default=oldest) >= oldest:
                before = found.get(row["problem_id"], Tally())
                found[row["problem_id"]] = Tally(before.attempts + 1, before.right + (row["verdict"] == Verdict.RIGHT))
    return found


def _arrow_type(kind: str) -> Any:
    import pyarrow

    if kind.startswith("list<"):
        return pyarrow.list_(_arrow_type(kind[5:-1]))
    return {"bool": pyarrow.bool_(), "float": pyarrow.float32()}.get(kind) or pyarrow.type_for_alias(kind)


def _row(step: int, attempt: AttemptRecord, decode: Decode | None) -> dict[str, Any]:
    problem, trajectory = attempt.problem, attempt.trajectory
    texts = [utf8(decode(turn.completion.token_ids)) if decode else "" for turn in trajectory.turns]
    return {
        "step": step,
        "problem_id": problem.id,
        "question": utf8(problem.question),
        "prompt_messages": json.dumps([dict(one) for one in problem.messages]) if problem.messages else None,
        "gold": utf8(problem.answer),
        "source": utf8(problem.source),
        "index": trajectory.index,
        "prompt_ids": trajectory.prompt_ids,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "sampled_logprobs": trajectory.sampled_logprobs,
        "entropies": attempt.entropies,
        "old_logprobs": attempt.old_logprobs,
        "turns": json.dumps([_turn(turn, text) for turn, text in zip(trajectory.turns, texts, strict=True)]),
        "text": texts,
        "stop": str(trajectory.stop),
        "fault": trajectory.fault and utf8(trajectory.fault),
        "response_tokens": trajectory.num_response_tokens,
        "calls": trajectory.num_calls,
        "failed_calls": trajectory.num_failed_calls,
        "seconds": trajectory.seconds,
        "tool_seconds": trajectory.tool_seconds,
        "policy_version": attempt.policy_version,
        **_judgement(attempt),
    }


def _judgement(attempt: AttemptRecord) -> dict[str, Any]:
    outcome, choice = attempt.trajectory.outcome, attempt.choice
    penalty = choice and choice.penalty
    return {
        "verdict": outcome and str(outcome.verdict),
        "reward": outcome and outcome.reward,
        "reward_parts": json.dumps(dict(outcome.parts)) if outcome and outcome.parts else None,
        "extracted": outcome and outcome.extracted and utf8(outcome.extracted),
        "method": outcome and outcome.method,
        "format_facts": outcome and json.dumps(_fields(outcome.format_facts)),
        "penalty_errors": penalty and penalty.errors,
        "penalty_format": penalty and penalty.format,
        "penalty_total": penalty and penalty.total,
        "kept": choice is not None and choice.kept,
        "reason": attempt.reason and str(attempt.reason),
        "weight": choice and choice.weight,
        "advantage": attempt.advantage,
    }


def _turn(turn: Turn, text: str) -> dict[str, Any]:
    calls = [_fields(call) for call in turn.calls]
    return {
        "finish": str(turn.completion.finish),
        **({"prompt_tokens": len(turn.prompt_ids)} if turn.prompt_ids else {}),
        "sampled_tokens": len(turn.completion.token_ids),
        "reply_tokens": len(turn.reply_ids),
        "version_spans": [list(span) for span in turn.completion.version_spans],
        "engine_seconds": turn.engine_seconds,
        "tool_seconds": turn.tool_seconds,
        "calls": calls,
        "results": [_fields(result) for result in turn.results],
        "segments": segments_of(text, calls),
    }


def _fields(noun: ToolCall | ToolResult | FormatFacts) -> Any:
    return plain({field.name: getattr(noun, field.name) for field in fields(noun)})
