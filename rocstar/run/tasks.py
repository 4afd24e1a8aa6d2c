"""The task of a run, built from a `[data]` section: arithmetic, problems of files, or a Task of the user's own."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rocstar.config.layers import validated
from rocstar.config.sections import DataSection, StageDataSection, TaskSection
from rocstar.data.arithmetic import arithmetic_problems
from rocstar.data.demonstrations import perform, plan_demonstrations
from rocstar.data.problems import asked_under_another_system, load_problems
from rocstar.errors import ConfigError
from rocstar.protocols import DemonstratingTask, Task
from rocstar.support.plugins import named, own_code
from rocstar.support.screen import plural
from rocstar.types import Demonstration, Problem, seed_for

Options = TypeVar("Options", bound=BaseModel)
T = TypeVar("T")
SHOWN_CHARS = 80  # of a task's return value, in a message


class DrawnTask(Task):
    """Problems drawn by a seed. The held-out ones are the same for every `run.seed`, so that runs can be compared."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._data = data
        self._tool_name = tool_name
        self._seed = seed
        self._heldout = self.drawn(heldout, seed_for("heldout"))
        self._taken = frozenset(problem.id for problem in self._heldout)

    @abstractmethod
    def drawn(self, count: int, seed: int, exclude: Set[str] = frozenset()) -> list[Problem]:
        """`count` different problems without the ids of `exclude`; fewer if there are no more."""

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        count = self._data.pool if isinstance(self._data, StageDataSection) else 0
        return self.drawn(count, seed_for(self._seed, "train"), self._taken | exclude)

    def heldout(self) -> list[Problem]:
        return self._heldout


class ArithmeticTask(DrawnTask):
    """Synthetic problems that need Python; demonstrations are noisy on purpose (see data/demonstrations.py)."""

    def drawn(self, count: int, seed: int, exclude: Set[str] = frozenset()) -> list[Problem]:
        return arithmetic_problems(self._data.families, count, seed, exclude)

    def demonstrations(self, count: int) -> list[Demonstration]:
        seed = seed_for(self._seed, "demonstrations")
        plans = plan_demonstrations(self.drawn(count, seed, self._taken), self._data.demo_mix, seed)
        return [perform(plan, self._tool_name) for plan in plans]


class FileTask(Task):
    """Problems from files; a repeated question is one problem, with its last answer. It has no demonstrations."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._data = data
        self._seed = seed
        self._count = heldout
        self.left_out: tuple[str, ...] = ()
        """What the last call of `problems` left out: held-out problems, rows with another answer later, and repeats."""

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        """Problems in the order of the files."""
        if not self._data.train_files:
            raise ConfigError("data.train_files is empty; give at least one JSONL, CSV or parquet file")
        excluded = exclude | {problem.id for problem in self.heldout()}
        rows = self._rows(self._data.train_files)
        there = {problem.id: problem for problem in rows}
        found = [problem for problem in there.values() if problem.id not in excluded]
        other = sum(_judged_by(there[row.id]) != _judged_by(row) for row in rows)
        repeats = len(rows) - len(there) - other
        counts = (
            (repeats, len(rows), "row", "left out, because a later one has the same question and answer"),
            (len(there) - len(found), len(there), "problem", "held out, and so not learnt from"),
            (other, len(rows), "row", "left out, because a later one has another answer to the same question"),
        )
        self.left_out = tuple(
            f"{left} of the {plural(every, what)} in data.train_files {'is' if left == 1 else 'are'} {why}"
            for left, every, what, why in counts
            if left
        )
        return found

    def heldout(self) -> list[Problem]:
        """The first `evaluate.problems` of the test files, in a seeded order."""
        problems = list(self.tested)
        random.Random(seed_for(self._seed, "heldout")).shuffle(problems)
        return problems[: self._count]

    @cached_property
    def tested(self) -> tuple[Problem, ...]:
        """All problems of the test files, drawn or not."""
        rows = self._rows(self._data.test_files) if isinstance(self._data, DataSection) else []
        return tuple({problem.id: problem for problem in rows}.values())

    def _rows(self, paths: Sequence[str]) -> list[Problem]:
        columns, limit = self._data.columns, self._data.max_problems
        return [
            problem
            for path in paths
            for problem in load_problems(Path(path), question=columns.question, answer=columns.answer, limit=limit)
        ]


def _judged_by(problem: Problem) -> Any:
    """Its reference; of one without, which a reward function judges, the columns."""
    return problem.answer or {name: value for name, value in problem.metadata.items() if name != "line"}


BUILT_IN: Mapping[str, type[ArithmeticTask | FileTask]] = {"arithmetic": ArithmeticTask, "files": FileTask}


def make_task(
    data: TaskSection, *, tool_name: str, seed: int, heldout: int, folders: Sequence[Path | str] = ()
) -> Task:
    """The Task that a `[data]` section (the run's or a stage's) asks for.

    heldout: the most problems to hold out. folders: where modules of the user's own are found (`support/plugins.py`).
    Raises ConfigError or DataError."""
    if data.source in BUILT_IN and data.options:
        raise ConfigError(
            f"data.options.{next(iter(data.options))} is for a Task of your own; data.source = {data.source!r} has no "
            "options"
        )
    keywords: dict[str, Any] = {"tool_name": tool_name, "seed": seed, "heldout": heldout}
    task_class: Any = named(
        data.source, BUILT_IN, setting="data.source", takes=("data",), keywords=tuple(keywords), folders=folders
    )
    task: Task
    if data.source in BUILT_IN:
        task = task_class(data, **keywords)
        return task
    source = f"data.source = {data.source!r}"
    with own_code(f"{source} failed", task_class):
        task = task_class(data, **keywords)
    for name in ("atoms", "problems", "heldout"):
        if not hasattr(task, name):
            raise ConfigError(f"{source} has no {name}; make it a subclass of rocstar.protocols.Task, or add it")
    return task


def heldout_problems(task: Task) -> list[Problem]:
    """`task.heldout`, no id twice. Raises ConfigError when a Task breaks its promise."""
    return _with_ids_of_their_own(task, _given(task, Problem, "heldout"), "held-out problems")


def training_problems(task: Task, heldout: Sequence[Problem]) -> list[Problem]:
    """`task.problems`, none of them held out and no id twice. Raises ConfigError when a Task breaks its promise."""
    heldout_ids = frozenset(problem.id for problem in heldout)
    problems = _given(task, Problem, "problems", exclude=heldout_ids)
    leaked = [problem for problem in problems if problem.id in heldout_ids]
    if leaked:
        raise ConfigError(
            f"{type(task).__name__}: {len(leaked)} problems to train on are held-out ones, the first is "
            f"{leaked[0].question!r}; leave out the ids that problems(exclude) is given"
        )
    return _with_ids_of_their_own(task, problems, "problems to train on")


def asked_again(problems: Sequence[Problem], heldout: Sequence[Problem]) -> str:
    """A sentence about held-out questions among those to learn from; empty if there are none. Where the system text is
    a part of the question they are others, so they are not left out."""
    count = sum(map(asked_under_another_system(heldout), problems))
    if not count:
        return ""
    asks = "asks" if count == 1 else "ask"
    return (
        f"{count} of the {plural(len(problems), 'problem')} to learn from {asks} a held-out question under another "
        "system text; leave such rows out, unless that text is a part of the question"
    )


def not_drawn(problems: Sequence[Problem], task: Task, drawn: int) -> str:
    """A sentence about questions of the test files that are learnt from, since `evaluate.problems` drew others to hold
    out; empty if there are none."""
    ids = {problem.id for problem in task.tested} if isinstance(task, FileTask) else set()
    if not (count := sum(problem.id in ids for problem in problems)):
        return ""
    return (
        f"{count} of the {plural(len(problems), 'problem')} to learn from {'is' if count == 1 else 'are'} in "
        f"data.test_files, too, and not among the evaluate.problems = {drawn} that are held out; raise that number to "
        "hold out all"
    )


def demonstrations_of(task: Task, stage: str, count: int) -> list[Demonstration]:
    """Raises ConfigError when the task has none, or breaks its promise."""
    return _given(require_demonstrations(task, stage), Demonstration, "demonstrations", count)


def require_demonstrations(task: Task, stage: str) -> DemonstratingTask:
    """The task itself. Raises ConfigError when it has no demonstrations for an sft stage to learn from."""
    if isinstance(task, DemonstratingTask):
        return task
    raise ConfigError(
        f"stage {stage}: an sft stage needs demonstrations and {type(task).__name__} has none; set sft.rows_file to a "
        "JSONL of messages, or give the Task a method demonstrations(count)"
    )


def checked_options(kind: type[Options], data: TaskSection) -> Options:
    """`[data.options]` as a Task's own pydantic model. Raises ConfigError, one sentence about the first thing wrong,
    also for an unknown option, which a model may ignore."""
    strict = type(kind.__name__, (kind,), {"model_config": {"extra": "forbid"}, "__module__": kind.__module__})
    try:
        validated(strict, dict(data.options), (), ())
        return kind.model_validate(dict(data.options), strict=True)
    except ConfigError as error:
        raise ConfigError(f"data.options of {data.source}: {str(error).removeprefix('the settings: ')}") from None


def _given(task: Task, kind: type[T], method: str, *args: Any, **keywords: Any) -> list[T]:
    """The result of a method of the task. Raises ConfigError if a user's own method fails or returns anything else."""
    if type(task) in BUILT_IN.values():
        given: list[T] = getattr(task, method)(*args, **keywords)
        return given
    method_name = f"data.source: {type(task).__name__}.{method}"
    with own_code(f"{method_name} failed", type(task)):
        given = getattr(task, method)(*args, **keywords)
        if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
            shown = repr(given)[:SHOWN_CHARS]
            raise ConfigError(f"{method_name} returned {shown}; return a list of {kind.__name__} of rocstar.types")
        return list(given)


def _with_ids_of_their_own(task: Task, problems: list[Problem], said: str) -> list[Problem]:
    if len({problem.id for problem in problems}) < len(problems):
        raise ConfigError(f"{type(task).__name__}: {said} share an id; give each question one of its own")
    return problems
