"""Metrics of runs as a picture: one panel a metric, one line a run. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.record.journal import read_journal

METRICS = ("reward/mean", "tool/error_share_in_correct", "len/tokens", "policy/entropy")
COLUMNS = 4  # panels beside each other
ENDINGS = (".png", ".svg", ".pdf")
Rows = Sequence[Mapping[str, Any]]
AXES: dict[str, Callable[[Rows], list[float]]] = {
    "step": lambda rows: [row["step"] for row in rows],
    "seconds": lambda rows: _summed(rows, "step/seconds"),
    "tokens": lambda rows: _summed(rows, "step/tokens"),
}
"""What may stand on the x axis: steps, or seconds or tokens (written, or learnt from in the cold start) so far."""


def plot(runs: Sequence[RunFolder], named: Sequence[str] | None, axis: str, path: Path) -> None:
    """named: the metrics to draw; without, those of METRICS that any of the runs has. Raises ConfigError for a metric
    that none of them has, a file that is no picture, or an unknown axis; OSError."""
    read = {run.name: list(read_journal(run.metrics)) for run in runs}
    metrics = named or _present(read)
    _refuse(read, metrics, axis, path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(metrics))
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
    """Values that are there, and a thin line where each stage but the first begins."""
    places = AXES[axis](rows)
    points = [(x, row[metric]) for x, row in zip(places, rows, strict=True) if row.get(metric) is not None]
    drawn = panel.plot(
        [x for x, _ in points], [y for _, y in points], label=name, marker="." if len(points) < 3 else ""
    )
    begins = [x for x, before, row in zip(places[1:], rows, rows[1:], strict=False) if before["stage"] != row["stage"]]
    for x in begins:
        if points and x > points[0][0]:
            panel.axvline(x, color=drawn[0].get_color(), linewidth=0.5, linestyle=":")


def _present(read: Mapping[str, Rows]) -> list[str]:
    """Defaults that can be drawn: a run in which nothing was right has no error share among right attempts."""
    there = _known(read)
    if not there:
        raise ConfigError(f"{', '.join(read)} has no metrics yet that could be drawn; wait for a first step")
    return [metric for metric in METRICS if metric in there] or there[:COLUMNS]


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
