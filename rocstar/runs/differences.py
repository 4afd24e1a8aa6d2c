"""Two runs against each other: settings that differ, and how far each metric came after as many steps of a stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rocstar.runs.folder import RunFolder, read_json
from rocstar.runs.journal import read_journal

LAST_STEPS = 10  # whose mean stands for where a metric came
METRICS = (
    *("loss", "reward/mean", "pass/mean", "tool/calls", "tool/error_rate", "tool/error_share_in_correct"),
    *("len/tokens", "len/truncated", "policy/entropy", "policy/logprob_gap", "step/seconds"),
)
"""Compared unless others are asked for."""
Row = dict[str, Any]


def flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted names; a list of tables that have names counts as a table of those."""
    for key, inner in value.items():
        if isinstance(inner, list) and inner and all(isinstance(one, Mapping) and "name" in one for one in inner):
            inner = {one["name"]: one for one in inner}
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{before}{key}.")
        else:
            yield f"{before}{key}", inner


def settings_that_differ(a: RunFolder, b: RunFolder) -> list[Row]:
    """`setting`, `a`, `b` for each key of config.resolved.json that is not the same; None where one has it not. A
    stage's own value is left out where it differs as the run's does. Raises DataError."""
    mine, theirs = (dict(flat(read_json(run.resolved))) for run in (a, b))
    differ = {
        name: (mine.get(name), theirs.get(name))
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    }
    own = (name for name in differ if differ.get(_of_the_run(name)) != differ[name])
    return [{"setting": name, "a": differ[name][0], "b": differ[name][1]} for name in own]


def _of_the_run(name: str) -> str:
    """The setting that a stage's own one stands for; the empty name for all others."""
    return name.split(".", 2)[2] if name.startswith("stage.") and name.count(".") > 2 else ""


def metrics_side_by_side(a: RunFolder, b: RunFolder, metrics: Sequence[str] = METRICS) -> list[Row]:
    """For each stage that both began and each metric that both have: the means over the last LAST_STEPS of as many
    steps as both did, `stage, steps, metric, a, b`. Raises DataError."""
    mine, theirs = (_by_stage(run) for run in (a, b))
    return [
        {"stage": stage, "steps": steps, "metric": metric, "a": first, "b": second}
        for stage in mine
        if stage in theirs and (steps := min(len(mine[stage]), len(theirs[stage])))
        for metric in metrics
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
