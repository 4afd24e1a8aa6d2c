"""The state of a run (`running`, `finished`, `stopped` or `failed`, and why), and a run as one JSON object: identity,
progress, and before against after. Reads files only, so it works on a running, finished or killed run.

The trainer writes `evals/before` and `evals/after`; `result.json` holds `accuracy` and `greedy` (each a figure
`{value, interval: [low, high], n}`; `greedy` may be null), `tool_error_share_in_correct`, `no_tool_share`,
`mean_response_tokens` and `transcripts`, a list of texts or of objects with `question`, `text`, `verdict` and
`problem_id`. Keys of metrics.jsonl that start with `cpu/` are CPU seconds of that step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rocstar.errors import DataError
from rocstar.record.folder import SCHEMA_VERSION, RunFolder, read_json
from rocstar.record.journal import Journal, read_journal
from rocstar.record.lock import is_written

ENDED = "ended"
"""The event of a run that an error ended; a resumed run writes others after it."""
QUIET_SECONDS = 900.0  # a run on another machine that wrote nothing for so long counts as stopped
CPU = "cpu/"
# Key of the summary, before `_before` and `_after` -> key of an evaluation's result.json.
COMPARED = {
    "accuracy": "accuracy",
    "greedy": "greedy",
    "tool_error_share_in_correct": "tool_error_share_in_correct",
    "no_tool_share": "no_tool_share",
    "tokens": "mean_response_tokens",
}
WARNING = ("step", "name", "evidence", "action")
OF_HELD_OUT = ("before", "during", "after")
"""Evaluations on a recipe's own held-out problems."""
Row = dict[str, Any]
Evaluated = tuple[str, int, Mapping[str, Any]]
"""(name, step, result)."""


def note_failure(run: RunFolder, reason: str) -> None:
    """Record the error that ends a run. Only for the holder of its lock. Raises OSError."""
    with Journal(run.events) as events:
        events.append({"time": round(time.time(), 3), "event": ENDED, "reason": reason})


def state_of(run: RunFolder) -> str:
    """The state of a run. One on another machine counts as running while it writes. Raises DataError."""
    if run.summary.exists():
        return "finished"
    writing = is_written(run.path)
    if writing is None:
        writing = time.time() - run.last_active / 1e9 < QUIET_SECONDS and not failure_of(run)
    if writing:
        return "running"
    return "failed" if failure_of(run) else "stopped"


def failure_of(run: RunFolder) -> str | None:
    """The error that ended a run; None if none did. Raises DataError."""
    events = read_journal(run.events)
    return str(events[-1].get("reason")) if events and events[-1].get("event") == ENDED else None


def show_or_broken(folder: RunFolder) -> Row:
    """The result of `show_run`; if the run's files are invalid, only its name, its path and the reason."""
    try:
        return show_run(folder)
    except (DataError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        return {"name": folder.name, "path": str(folder.path), "broken": str(error) or type(error).__name__}


def show_run(folder: RunFolder) -> Row:
    """Identity, stages with their steps done, last metrics, evaluations, `summary`, one transcript before and after.

    Raises DataError for an invalid file."""
    identity = folder.identity
    rows = read_journal(folder.metrics)
    evaluations = folder.evaluations()
    return {
        "schema_version": SCHEMA_VERSION,
        "name": folder.name,
        "path": str(folder.path),
        "started": identity.get("started"),
        "versions": identity.get("versions"),
        "git": identity.get("git"),
        "hardware": identity.get("hardware"),
        "branched_from": identity.get("branched_from"),
        "changes": folder.changes,
        "sweep": read_json(folder.resolved).get("run", {}).get("sweep") or None,
        "finished": folder.summary.exists(),
        "state": (state := state_of(folder)),
        "reason": failure_of(folder) if state == "failed" else None,
        "step": rows[-1]["step"] if rows else 0,
        "stages": _stages(folder, rows),
        "warnings": _warnings(folder),
        "metrics": rows[-1] if rows else {},
        "evals": [
            {
                "evaluation": f"{folder.name}/{name}@{step}",
                "name": name,
                "step": step,
                **{key: value for key, value in result.items() if key != "transcripts"},
            }
            for name, step, result in evaluations
        ],
        "summary": read_json(folder.summary) if folder.summary.exists() else summary_of(evaluations, rows),
        "transcripts": paired_transcripts(_last(evaluations, "before"), _last(evaluations, "after")),
    }


def summary_of(evaluations: Sequence[Evaluated], rows: Sequence[Mapping[str, Any]]) -> Row:
    """The `summary` object from finished evaluations and the rows of metrics.jsonl; null for missing values."""
    results = {when: _last(evaluations, when) for when in ("before", "after")}
    compared = {
        f"{key}_{when}": results[when].get(source) for key, source in COMPARED.items() for when in ("before", "after")
    }
    return {**compared, "benchmarks": _along(evaluations), "cpu_seconds": cpu_seconds(rows)}


def _along(evaluations: Sequence[Evaluated]) -> list[Row]:
    """The first and last of each evaluation that was made after several steps."""
    series: dict[str, list[Row]] = defaultdict(list)
    for name, step, result in evaluations:
        series[name].append({"step": step, "accuracy": result.get("accuracy")})
    return [
        {"name": name, "before": points[0], "after": points[-1]}
        for name, points in series.items()
        if len(points) > 1 and name not in OF_HELD_OUT
    ]


def _last(evaluations: Sequence[Evaluated], wanted_name: str) -> Mapping[str, Any]:
    """The last result of that name; empty if there is none."""
    return next((result for name, _, result in reversed(evaluations) if name == wanted_name), {})


def cpu_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU seconds by phase: the sums of the `cpu/...` metrics."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({key.removeprefix(CPU): row[key] for key in row if key.startswith(CPU) and row[key]})
    return {phase: round(seconds, 3) for phase, seconds in total.items()}


def paired_transcripts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """One transcript of each: of the same problem if possible, preferably wrong before and right after."""
    first, last = (result.get("transcripts") or [] for result in (before, after))
    pairs = [(a, b) for a in first for b in last if _same_problem(a, b)]
    pairs.sort(key=lambda pair: pair[0].get("verdict") == "right" or pair[1].get("verdict") != "right")
    pair = pairs[0] if pairs else (next(iter(first), None), next(iter(last), None))
    return dict(zip(("before", "after"), pair, strict=True))


def _same_problem(a: Any, b: Any) -> bool:
    both = isinstance(a, dict) and isinstance(b, dict)
    return both and a.get("problem_id") is not None and a["problem_id"] == b.get("problem_id")


def _stages(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    done = Counter(row.get("stage") for row in rows)
    ends = [event for event in read_journal(folder.events) if event["event"] == "stage_end"]
    reasons = {(event["name"], event["steps"]): event["reason"] for event in ends}  # a kill may undo some steps
    return [
        {
            **{key: stage[key] for key in ("name", "kind", "steps")},
            "done": done[stage["name"]],
            "ended": reasons.get((stage["name"], done[stage["name"]])),
        }
        for stage in read_json(folder.resolved).get("stage", [])
    ]


def _warnings(folder: RunFolder) -> list[Row]:
    """Each alarm once for each step that raised it."""
    rang = [event for event in read_journal(folder.events) if event["event"] == "warning"]
    unique = {(event["step"], event["name"]): event for event in rang}  # a kill makes a run pass a step twice
    return [{key: event[key] for key in WARNING} for _, event in sorted(unique.items())]
