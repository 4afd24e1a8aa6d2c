"""Counts every row of a build, by source and fate.

Nothing in it depends on the time, the machine or the place of the files: same input and config, same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rocstar.data.pool.config import PoolConfig
from rocstar.types import Problem

SCHEMA = 1
KEPT = "kept"
READ = "read"


@dataclass(slots=True, kw_only=True)
class Datasheet:
    """Filled while a pool is built."""

    config: PoolConfig
    rules: Sequence[str]
    """Names of all rules that were applied, in order."""
    inputs: list[Mapping[str, Any]] = field(default_factory=list)
    """Each file that was read, as datasheet.json tells it."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Benchmark excluded from the comparison -> why."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(source, READ, KEPT or a rule) -> rows."""
    asked: Counter[str] = field(default_factory=Counter)
    """Source -> kept rows whose question was extended so that the answer is an integer."""
    unasked: int = 0
    """Kept rows of the sources it covers for which the agreement check had no answers."""
    outputs: dict[str, str] = field(default_factory=dict)
    """File -> sha256."""

    @property
    def sources(self) -> list[str]:
        return [file["name"] for file in self.inputs if file["role"] == "source"]

    @property
    def answers(self) -> Sequence[str]:
        """The files that labels are checked with."""
        return self.config.agreement.answers if "disagreement" in self.rules else []

    @property
    def benchmarks(self) -> list[str]:
        """Sentences that list the benchmarks compared with, and those that were not."""
        files = (file for file in self.inputs if file["role"] == "benchmark")
        compared = ", ".join(f"{file['name']} ({file['rows']:,})" for file in files)
        others = [f"not compared with {name}: {why}" for name, why in self.not_compared.items()]
        return [f"compared with the questions of {compared or 'no benchmark'}", *others]

    def count_kept(self, problem: Problem, *, answered: bool) -> None:
        """Count a row of the pool; answered: whether the agreement check had answers to it."""
        self.counts[problem.source, KEPT] += 1
        self.asked[problem.source] += "asked_from" in problem.metadata
        self.unasked += self.config.agreement.covers(problem.source) and not answered

    def total(self, fate: str) -> int:
        """Rows of one fate over all sources."""
        return sum(count for (_, name), count in self.counts.items() if name == fate)

    def funnel(self) -> list[tuple[str, int, dict[str, int]]]:
        """(fate, rows, rows by source): read, each rule that dropped something, kept."""
        fates = [READ, *(rule for rule in self.rules if self.total(rule)), KEPT]
        return [(fate, self.total(fate), {s: self.counts[s, fate] for s in self.sources}) for fate in fates]

    def as_json(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json", exclude={"data", "out"})
        return {
            "schema": SCHEMA,
            "kept": self.total(KEPT),
            "funnel": {fate: {"all": rows, **by_source} for fate, rows, by_source in self.funnel()},
            "asked_for_integer": {source: self.asked[source] for source in self.sources},
            "agreement_unasked": self.unasked,
            "benchmarks_not_compared": dict(self.not_compared),
            "inputs": self.inputs,
            "outputs": dict(self.outputs),
            "config": config,
        }


def row_of(values: Mapping[str, Any]) -> bytes:
    """One JSONL line; equal values give equal bytes."""
    return (json.dumps(values, ensure_ascii=False, default=str) + "\n").encode("utf-8", "surrogatepass")
