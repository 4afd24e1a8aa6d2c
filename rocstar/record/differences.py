"""Compares runs: settings that differ, and each metric after equally many steps of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rocstar.config.tree import flat
from rocstar.config.unread import OF_MADE_UP, OF_RANDOM_WEIGHTS
from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import read_journal

LAST_STEPS = 10  # whose mean represents a metric's final value
METRICS = (
    *("loss", "reward/mean", "pass/mean", "tool/calls", "tool/error_rate", "tool/error_share_in_correct"),
    *("len/tokens", "len/truncated", "policy/entropy", "policy/logprob_gap", "step/seconds"),
)
"""Compared by default, with all parts of a reward."""
Row = dict[str, Any]


def settings_that_differ(a: RunFolder, b: RunFolder) -> list[Row]:
    """`setting`, `a`, `b` for each key of config.resolved.json that varies; None if one lacks it. Raises DataError."""
    mine, theirs = (dict(flat(read_json(run.resolved))) for run in (a, b))
    return [{"setting": name, "a": mine.get(name), "b": theirs.get(name)} for name in varying((mine, theirs))]


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of flat settings whose values are not the same in all of them. Omits keys that are not in force in one of
    them, and a stage's own value if it differs only as the run's does."""
    idle = {*OF_RANDOM_WEIGHTS.split()} if any(one.get("model.path") is not None for one in settings) else set()
    idle |= {*OF_MADE_UP.split()} if any(one.get("data.source") != "arithmetic" for one in settings) else set()
    known = sorted({name for one in settings for name in one})
    columns = {name: [one.get(name) for one in settings] for name in known}
    differ = {
        name: column
        for name, column in columns.items()
        if any(value != column[0] for value in column) and name not in idle and _of_the_run(name) not in idle
    }
    return [name for name in differ if differ.get(_of_the_run(name)) != differ[name]]


def _of_the_run(name: str) -> str:
    """The run's setting that a stage's own setting overrides; the empty name for all others."""
    return name.split(".", 2)[2] if name.startswith("stage.") and name.count(".") > 2 else ""


def metrics_side_by_side(a: RunFolder, b: RunFolder, requested: Sequence[str] = ()) -> list[Row]:
    """For each stage that both began and each metric that both have, of METRICS or the requested ones: the means over
    the last LAST_STEPS of the steps that both did, `stage, steps, metric, a, b`. Raises DataError, and ConfigError for
    a requested metric that one of them lacks."""
    mine, theirs = (_by_stage(run) for run in (a, b))
    for run, rows in ((a, mine), (b, theirs)):
        known = sorted(
            {name for of_stage in rows.values() for row in of_stage for name in row if "/" in name} | {"loss"}
        )
        for name in requested:
            if name not in known:
                raise ConfigError(f"{run.name} has no metric {name}; it has {', '.join(known)}")
    return [
        {"stage": stage, "steps": steps, "metric": metric, "a": first, "b": second}
        for stage in mine
        if stage in theirs and (steps := min(len(mine[stage]), len(theirs[stage])))
        for metric in requested or (*METRICS, *sorted({n for row in mine[stage] for n in row if "/parts/" in n}))
        if (first := _came_to(mine[stage][:steps], metric)) is not None
        and (second := _came_to(theirs[stage][:steps], metric)) is not None
    ]


def _by_stage(run: RunFolder) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in read_journal(run.metrics):
        found[str(row.get("stage"))].append(row)
    return dict(found)


def _came_to(rows: Sequence[Row], metric: str) -> float | None:
    values = [row[metric] for row in rows[-LAST_STEPS:] if row.get(metric) is not None]
    return fmean(values) if values else None
