"""What a run learns: training problems, held-out problems and cold-start demonstrations, from one `[data]` section.

Three sources behind one small seam; the recipe picks one by name."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from rocstar.config import TaskSection
from rocstar.data.arithmetic import arithmetic_problems
from rocstar.data.demonstrations import perform, plan_demonstrations
from rocstar.data.files import load_problems
from rocstar.errors import ConfigError
from rocstar.types import Demonstration, Problem, ToolCall, ToolResult, seed_for

Run = Callable[[ToolCall], Awaitable[ToolResult]]


class Task(Protocol):
    """Promise: no problem to train on is a held-out one; same settings and seed, same everything."""

    @property
    def atoms(self) -> tuple[str, ...]:
        """Strings that a tokenizer trained for this task keeps whole."""
        ...

    def problems(self) -> list[Problem]: ...

    def heldout(self) -> list[Problem]: ...

    async def demonstrations(self, count: int, run: Run) -> list[Demonstration]:
        """Cold-start conversations; tool results in them are what `run` gave, or what it would give."""
        ...


class ArithmeticTask:
    """Synthetic problems that need Python; demonstrations are noisy on purpose (see data/demonstrations.py)."""

    atoms: tuple[str, ...] = ()

    def __init__(self, settings: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._settings = settings
        self._tool_name = tool_name
        self._seed = seed
        # The held-out problems are the same for every seed, so that runs can be compared.
        self._heldout = arithmetic_problems(settings.families, heldout, seed_for("heldout"))
        self._taken = frozenset(problem.id for problem in self._heldout)

    def problems(self) -> list[Problem]:
        pool = getattr(self._settings, "pool", 0)
        return arithmetic_problems(self._settings.families, pool, seed_for(self._seed, "train"), exclude=self._taken)

    def heldout(self) -> list[Problem]:
        return self._heldout

    async def demonstrations(self, count: int, run: Run) -> list[Demonstration]:
        seed = seed_for(self._seed, "demonstrations")
        problems = arithmetic_problems(self._settings.families, count, seed, exclude=self._taken)
        plans = plan_demonstrations(problems, self._settings.demo_mix, seed)
        return await perform(plans, run, tool_name=self._tool_name)


class FileTask:
    """Problems from files; no demonstrations of its own (an sft stage then needs `sft.rows_file`)."""

    atoms: tuple[str, ...] = ()

    def __init__(self, settings: TaskSection, *, seed: int, heldout: int) -> None:
        self._settings = settings
        self._seed = seed
        self._count = heldout

    def problems(self) -> list[Problem]:
        if not self._settings.train_files:
            raise ConfigError("data.train_files is empty; give at least one JSONL, CSV or parquet file")
        known = {problem.id for problem in self.heldout()}
        kept = {p.id: p for path in self._settings.train_files for p in self._load(path) if p.id not in known}
        return list(kept.values())

    def heldout(self) -> list[Problem]:
        """The first `evaluate.problems` rows of the test files, in a seeded order."""
        rows = list({p.id: p for path in getattr(self._settings, "test_files", ()) for p in self._load(path)}.values())
        random.Random(seed_for(self._seed, "heldout")).shuffle(rows)
        return rows[: self._count]

    def _load(self, path: str) -> list[Problem]:
        columns = self._settings.columns
        return load_problems(
            Path(path), question=columns.question, answer=columns.answer, limit=self._settings.max_problems
        )


def make_task(settings: TaskSection, *, tool_name: str, seed: int, heldout: int) -> Task:
    """The task a `[data]` section asks for. Raises ConfigError or DataError."""
    if settings.source == "files":
        return FileTask(settings, seed=seed, heldout=heldout)
    return ArithmeticTask(settings, tool_name=tool_name, seed=seed, heldout=heldout)
