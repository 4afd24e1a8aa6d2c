"""Means of metrics over the last steps of a stage, for the rules that end it and for alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

Row = Mapping[str, float | None]
"""Metrics of one step."""


def window_mean(rows: Sequence[Row], name: str, window: int, back: int = 0) -> float | None:
    """Over the `window` steps up to `back` before the last; None where there are fewer, or one lacks the metric."""
    end = len(rows) - back
    values = [row.get(name) for row in rows[max(0, end - window) : max(0, end)]]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == window else None


def window_means(rows: Sequence[Row], name: str, window: int) -> Iterator[float]:
    """Of all windows of so many steps that have the metric, in order."""
    for back in range(len(rows) - window, -1, -1):
        mean = window_mean(rows, name, window, back)
        if mean is not None:
            yield mean
