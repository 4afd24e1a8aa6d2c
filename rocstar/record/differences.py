"""Compares runs: settings that differ, each metric after equally many steps of a stage, and plots of metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
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
"""Compared by default."""
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
        for metric in requested or METRICS
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


# Metrics of runs as a picture: one panel a metric, one line a run. Needs matplotlib.

DRAWN_METRICS = ("reward/mean", "tool/error_share_in_correct", "len/tokens", "policy/entropy")
PANELS_BESIDE = 4  # panels beside each other
ENDINGS = (".png", ".svg", ".pdf")
Rows = Sequence[Mapping[str, Any]]
AXES: dict[str, Callable[[Rows], list[float]]] = {
    "step": lambda rows: [row["step"] for row in rows],
    "seconds": lambda rows: _summed(rows, "step/seconds"),
    "tokens": lambda rows: _summed(rows, "step/tokens"),
}
"""Quantities of the x axis: steps, or seconds or tokens (written, or learnt from in the cold start) so far."""


def plot(runs: Sequence[RunFolder], named: Sequence[str] | None, axis: str, path: Path) -> None:
    """Draw metrics of runs into a file. named: which ones; by default those of DRAWN_METRICS that any run has. Raises
    ConfigError for a metric that no run has, a file name that is not a picture's, or an unknown axis; OSError."""
    read = {run.name: list(read_journal(run.metrics)) for run in runs}
    # Defaults that can be drawn: a run in which nothing was right has no error share among right attempts.
    there = _known(read)
    metrics = named or [metric for metric in DRAWN_METRICS if metric in there] or there[:PANELS_BESIDE]
    if not metrics:
        raise ConfigError(f"{', '.join(read)} has no metrics yet that could be drawn; wait for a first step")
    _refuse(read, metrics, axis, path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(PANELS_BESIDE, len(metrics))
    lines = -(-len(metrics) // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False)
    for panel, metric in zip(grid.flat, metrics, strict=False):
        for name, rows in read.items():
            _line(panel, name, rows, metric, axis)
        panel.set(title=metric, xlabel=axis)
    for panel in grid.flat[len(metrics) :]:
        panel.axis("off")
    grid[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _line(panel: Any, name: str, rows: Rows, metric: str, axis: str) -> None:
    """Draw the existing values, and a thin line at the beginning of each stage but the first."""
    places = AXES[axis](rows)
    points = [(x, row[metric]) for x, row in zip(places, rows, strict=True) if row.get(metric) is not None]
    drawn = panel.plot(
        [x for x, _ in points], [y for _, y in points], label=name, marker="." if len(points) < 3 else ""
    )
    begins = [x for x, before, row in zip(places[1:], rows, rows[1:], strict=False) if before["stage"] != row["stage"]]
    for x in begins:
        if points and x > points[0][0]:
            panel.axvline(x, color=drawn[0].get_color(), linewidth=0.5, linestyle=":")


def _known(read: Mapping[str, Rows]) -> list[str]:
    return sorted({key for rows in read.values() for row in rows for key in row if isinstance(row[key], float)})


def _refuse(read: Mapping[str, Rows], metrics: Sequence[str], axis: str, path: Path) -> None:
    known = _known(read)
    missing = [metric for metric in metrics if metric not in known]
    if missing:
        raise ConfigError(f"no run has a metric {missing[0]}; they have {', '.join(known) or 'none yet'}")
    if axis not in AXES:
        raise ConfigError(f"--x {axis} is none of {', '.join(AXES)}")
    if path.suffix not in ENDINGS:
        raise ConfigError(f"{path} would be no picture; let its name end in {', '.join(ENDINGS)}")


def _summed(rows: Rows, key: str) -> list[float]:
    return list(accumulate(row.get(key) or 0.0 for row in rows))
