"""Metrics over steps, read once and then only what was appended. A row of metrics.jsonl is one point of every curve."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rocstar.record.journal import Tail, numbers_in

SPARK_POINTS = 60
SHOWN_FIRST = ("reward/mean", "loss")
"""What the small curve of a run shows: the first of these that it has."""
MOST_METRICS = 2000  # names in one file; a plugin that keeps making new ones must not fill the memory


@dataclass(slots=True)
class Curves:
    """The columns of one metrics.jsonl. A line that is no JSON object is counted and left out."""

    _tail: Tail
    names: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    """[rows] name of each row's stage."""
    broken: int = 0
    """Lines that could not be read."""
    _columns: dict[str, array[float]] = field(default_factory=dict)

    def refresh(self) -> Curves:
        """Take up what was appended; a file that was replaced or became shorter (resume) is read anew."""
        anew, lines = self._tail.fresh()
        if anew:
            self.names, self.stages, self._columns, self.broken = [], [], {}, 0
        for line in lines:
            try:
                row = json.loads(line)
                stage = str(row.pop("stage", ""))
                numbers = numbers_in(row)
            except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
                self.broken += 1
                continue
            self._append(numbers, stage)
        return self

    def column(self, name: str) -> list[float]:
        """[rows] numbers; nan where a row lacks the name."""
        values = self._columns.get(name, array("d"))
        return [*values, *[math.nan] * (len(self.stages) - len(values))]

    def axes(self) -> dict[str, list[float]]:
        """What a curve can stand over: steps; steps with attempts, from 1 and nan elsewhere, so that runs with cold
        starts of different lengths lie on each other; hours of steps' wall time; millions of tokens."""
        count = itertools.count(1)
        return {
            "step": self.column("step"),
            "rl": [value if math.isnan(value) else float(next(count)) for value in self.column("reward/mean")],
            "hours": _running(self.column("step/seconds"), 3600.0),
            "tokens": _running(self.column("step/tokens"), 1e6),
        }

    def last(self) -> dict[str, float]:
        """The last value of each name that the last row has."""
        rows = len(self.stages)
        return {name: values[-1] for name, values in self._columns.items() if len(values) == rows}

    def spark(self) -> dict[str, Any]:
        """A small curve: at most SPARK_POINTS means of neighbouring rows."""
        name = next((name for name in SHOWN_FIRST if name in self._columns), None)
        values = [value for value in self.column(name or "") if not math.isnan(value)]
        size = max(1, -(-len(values) // SPARK_POINTS))
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        return {"metric": name, "values": [sum(part) / len(part) for part in parts]}

    def spans(self) -> list[dict[str, Any]]:
        """Stages as they came: name, first and last step."""
        steps, found = self.column("step"), list[dict[str, Any]]()
        for step, stage in zip(steps, self.stages, strict=True):
            if not found or found[-1]["name"] != stage:
                found.append({"name": stage, "first": step})
            found[-1]["last"] = step
        return found

    def _append(self, row: dict[str, float], stage: str) -> None:
        rows = len(self.stages)
        self.stages.append(stage)
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_METRICS:
                    continue
                column = self._columns[name] = array("d")
                self.names.append(name)
            column.extend([math.nan] * (rows - len(column)))
            column.append(value)


def _running(values: Sequence[float], unit: float) -> list[float]:
    total, found = 0.0, []
    for value in values:
        total += 0.0 if math.isnan(value) else value
        found.append(total / unit)
    return found
