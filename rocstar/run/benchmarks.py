"""Benchmarks that a recipe names (`[[evaluate.benchmark]]`), read and checked before a run begins. Loads no torch.

Each is evaluated under its own protocol with the recipe's changes, the same in every stage, so that its figures can be
compared along the run. Not here: what a benchmark is (`rocstar/evaluation/`), and when it is evaluated (`run.py`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rocstar.config.layers import key_of
from rocstar.config.recipe import changed, refuse_others
from rocstar.config.sections import BenchmarkSection, Recipe
from rocstar.errors import ConfigError
from rocstar.evaluation.benchmark import find_benchmarks
from rocstar.evaluation.evaluate import Protocol
from rocstar.evaluation.kinds import ProblemSet, read_benchmark
from rocstar.record.show import OF_HELD_OUT

READ = ("rollout.max_turns", "rollout.max_response_tokens", "rollout.max_parallel_calls", "rollout.top_p",
        "rollout.top_k", "rollout.truncated", "rollout.feedback", "evaluate.verifier")  # fmt: skip
"""Prefixes of keys that an evaluation between steps obeys; engines, template and sandbox are the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBenchmark:
    """A benchmark that a recipe names, with the settings in force during its evaluation."""

    source: ProblemSet
    recipe: Recipe
    """Settings in force during its evaluation."""
    protocol: Protocol

    @property
    def name(self) -> str:
        return self.source.stem


def read_benchmarks(recipe: Recipe) -> list[NamedBenchmark]:
    """Raises ConfigError and DataError for anything that would prevent an evaluation."""
    found = []
    for section in recipe.evaluate.benchmark:
        source = _problem_set(section)
        own = source.protocol
        in_force = changed(recipe.as_evaluated(), [*own.settings, *section.settings], {})
        protocol = Protocol(
            attempts=own.attempts if section.attempts is None else section.attempts,
            temperature=own.temperature if section.temperature is None else section.temperature,
            top_p=in_force.rollout.top_p,
            top_k=in_force.rollout.top_k,
            seed=in_force.run.seed,
        )
        if copies := recipe.copies(protocol.attempts, protocol.temperature):
            raise ConfigError(f"benchmark {source.title}: {copies}")
        found.append(NamedBenchmark(source=source, recipe=in_force, protocol=protocol))
    for name, count in Counter([*OF_HELD_OUT, *(benchmark.name for benchmark in found)]).items():
        if count > 1:
            raise ConfigError(
                f"evaluate.benchmark names {name!r} twice, or as this run's own evaluations are named "
                f"({', '.join(OF_HELD_OUT)}); give the TOML file of one of them another name"
            )
    return found


def _problem_set(section: BenchmarkSection) -> ProblemSet:
    if "," in section.name:
        raise ConfigError(
            f"evaluate.benchmark.name = {section.name!r} is several; give each its own [[evaluate.benchmark]]"
        )
    (benchmark,) = find_benchmarks(section.name)
    folder = Path(section.folder) if section.folder is not None else None
    source = read_benchmark(benchmark, folder, limit=section.limit, accept=section.accept_rows)
    if source.kind.needs_judge:
        raise ConfigError(
            f"benchmark {source.title} is scored by a judge, and training has none; leave it out and evaluate "
            f"checkpoints with rocstar eval RUN@STEP --benchmark {source.title} --judge URL"
        )
    given = (*source.protocol.settings, *section.settings)
    refuse_others(given, READ, f"benchmark {source.title}, between steps of a run,")
    for setting in section.settings:
        if source.kind.leaves_unread(key_of(setting)):
            raise ConfigError(f"{setting!r} has no effect on benchmark {source.title}, which has its own; leave it out")
    return source
