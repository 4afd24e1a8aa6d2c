"""Word problems as a Task: CSV rows in, varied demonstrations and problems out, test rows untouched.

Reading rows is `rows.py`, varying them `variations.py` and `wording.py`; here the options meet them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rocstar.config.sections import DataSection, TaskSection
from rocstar.errors import ConfigError
from rocstar.protocols import Task
from rocstar.run.tasks import checked_options
from rocstar.types import Demonstration, Problem, seed_for
from word_problems.options import Options
from word_problems.programs import unordered_program
from word_problems.rows import (
    WordProblem,
    bound_program,
    consistent,
    held_out,
    inline_program,
    read_word_problems,
    to_problem,
)
from word_problems.variations import (
    MAX_NUMBERS,
    Variation,
    asked_twice,
    oversampled,
    training_demonstrations,
    training_problems,
)
from word_problems.wording import reworded

PLACEHOLDERS = tuple(f"n{index}" for index in range(MAX_NUMBERS))
"""Names of numbers, one token each."""
PROGRAMS = {"inline": inline_program, "bound": bound_program, "unordered": unordered_program}


class WordProblemTask(Task):
    """Real questions, varied for training; held-out problems stay as they are in their file.

    Held out are the test files; without any, the questions set aside by the option `holdout`, so that settings can be
    chosen without a look at the test. No RL problem equals a held-out one in question and numbers, but the published
    MAWPS folds repeat questions, and demonstrations are made of whatever the training files hold. Outputs in them are
    worked out, not run through `run` (see `demonstrate`); tests compare them with real runs."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._data = data
        self._options = checked_options(Options, data)
        self._tool_name = tool_name
        self._seed = seed
        self._count = heldout

    @property
    def atoms(self) -> tuple[str, ...]:
        named = self._options.numbers == "masked" or self._options.program == "bound"
        return PLACEHOLDERS if named else ()

    def problems(self, exclude: Set[str] = frozenset()) -> list[Problem]:
        known = exclude | {problem.id for problem in self.heldout()}
        drawn = training_problems(
            self._varied_rows,
            self._options.pool,
            numbers=self._options.numbers,
            variation=self._variation,
            seed=seed_for(self._seed, "problems"),
        )
        return list({problem.id: problem for problem in drawn if problem.id not in known}.values())

    def heldout(self) -> list[Problem]:
        """The first `evaluate.problems` of the different test problems, in a seeded order. Metadata `rows` says how
        often a problem stands in the files, `duplicate` whether its question was trained on."""
        training, development = self._parts
        files = self._data.test_files if isinstance(self._data, DataSection) else []
        rows = _read(files) if files else development
        seen = {row.template for row in training}
        problems = [self._asked(row, seen) for row in rows]
        repeats = Counter(problem.id for problem in problems)
        order = list({problem.id: _noted(problem, rows=repeats[problem.id]) for problem in problems}.values())
        random.Random(seed_for(self._seed, "heldout")).shuffle(order)
        return order[: self._count]

    def demonstrations(self, count: int) -> list[Demonstration]:
        return training_demonstrations(
            self._varied_rows,
            count,
            numbers=self._options.numbers,
            variation=self._variation,
            seed=seed_for(self._seed, "demonstrations"),
            tool_name=self._tool_name,
            answer_share=self._options.answer_share,
            program=PROGRAMS[self._options.program],
        )

    @property
    def _variation(self) -> Variation:
        options = self._options
        return Variation(
            redraws=options.redraws,
            same_length_share=options.same_length_share,
            distractor_share=options.distractor_share,
            swap_share=options.swap_share,
        )

    @cached_property
    def _parts(self) -> tuple[list[WordProblem], list[WordProblem]]:
        """(training rows, development rows) of the training files."""
        if not self._data.train_files:
            raise ConfigError("data.train_files is empty; give at least one CSV file of word problems")
        rows = consistent(_read(self._data.train_files))[: self._data.max_problems]
        if not rows:
            raise ConfigError("data.train_files hold no row whose equation gives its answer; check the files")
        return _set_aside(rows, self._options.holdout, self._seed)

    @cached_property
    def _varied_rows(self) -> Sequence[WordProblem]:
        """Training rows in all their wordings, as often as they are shown in one pass."""
        options = self._options
        rows = oversampled(self._parts[0], options.oversample)
        worded = reworded(
            rows,
            options.wordings,
            rename_share=options.rename_share,
            decoy_share=options.decoy_share,
            shuffle_share=options.shuffle_share,
            seed=seed_for(self._seed, "wordings"),
        )
        return [asked_twice(row) if options.ask_twice else row for row in worded]

    def _asked(self, row: WordProblem, seen: set[str]) -> Problem:
        """A held-out row as a problem; looked up among the training questions before it is asked twice."""
        problem = to_problem(asked_twice(row) if self._options.ask_twice else row, self._options.numbers)
        return _noted(problem, template=row.template, duplicate=row.template in seen)


def _noted(problem: Problem, **facts: object) -> Problem:
    return replace(problem, metadata={**problem.metadata, **facts})


def _read(paths: Iterable[str]) -> list[WordProblem]:
    return [row for path in paths for row in read_word_problems(Path(path))]


def _set_aside(rows: list[WordProblem], count: int, seed: int) -> tuple[list[WordProblem], list[WordProblem]]:
    try:
        return held_out(rows, count, seed)
    except ValueError as error:
        raise ConfigError(f"{error}; lower data.options.holdout or give more files") from None
