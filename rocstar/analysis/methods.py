"""Several runs of one method, for instance its seeds, as one curve: mean and range over the runs, by step.

    rocstar analyze GRPO=grpo-1,grpo-2 RoC=roc-1,roc-2

A name alone is a method of one run. Not here: the figures of one run (report.py), and how curves look."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rocstar.errors import ConfigError

Report = Mapping[str, Any]
Values = list[tuple[int, float]]
"""(step, value)"""
ValuesOf = Callable[[Report], Values]


def method_of(argument: str) -> tuple[str, tuple[str, ...]]:
    """The label of a method and the names of its runs, as `find_source` takes them: `LABEL=NAME,NAME`, or one name;
    what has a slash before its first "=", or is a file, is a name.

    Raises ConfigError for a label without names, or with a name twice."""
    label, equals, rest = argument.partition("=")
    if not equals or "/" in label or Path(argument).exists():
        return argument, (argument,)
    names = tuple(rest.split(","))
    if not label or "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{argument!r} is no LABEL=NAME,NAME: it needs a label, and names that differ")
    return label, names


def by_method(reports: Iterable[Report]) -> dict[str, list[Report]]:
    """The reports of each method's runs, methods in order of their first."""
    found: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        found[report["method"]].append(report)
    return dict(found)


def curve(reports: Sequence[Report], values: ValuesOf) -> list[dict[str, Any]]:
    """The curve of the runs of one method, by `step`: `mean`, `lowest` and `highest` over the `runs` that have a value
    there, each with the same weight."""
    found: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        for step, value in values(report):
            found[step].append(value)
    return [
        {"step": step, "mean": fmean(some), "lowest": min(some), "highest": max(some), "runs": len(some)}
        for step, some in sorted(found.items())
    ]


def values_of(part: str, key: str) -> ValuesOf:
    """A function that takes (step, value) from a list of a report, without the rows that have no value."""
    return lambda report: [(row["step"], row[key]) for row in report[part] if row[key] is not None]


def failed_calls_in_right(report: Report) -> Values:
    """Fig. 4: from the attempts where they were kept, else from the metrics."""
    key = "failed_call_share_in_right"
    return values_of("by_step", key)(report) or values_of("training", key)(report)


CURVES: Mapping[str, ValuesOf] = {
    "failed_call_share_in_right": failed_calls_in_right,
    "right_share": values_of("by_step", "right_share"),
    "tokens": values_of("by_step", "tokens"),
}
"""The curves of each method, by their names in a report."""


def methods_of(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Each method with its runs and its curves, for programs."""
    return [
        {
            "method": label,
            "runs": [report["source"] for report in runs],
            "curves": {key: curve(runs, values) for key, values in CURVES.items()},
        }
        for label, runs in by_method(reports).items()
    ]
