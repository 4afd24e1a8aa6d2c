"""Word problems as a Task: CSV rows in, varied demonstrations and problems out, test rows untouched.

Reading rows is `data/word_problems.py`, varying them `data/variations.py`; here the switches of `[data]` meet them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from rocstar.config import DataSection
from rocstar.data.programs import unordered_program
from rocstar.data.variations import (
    MAX_NUMBERS,
    Variation,
    asked_twice,
    oversampled,
    training_demonstrations,
    training_problems,
)
from rocstar.data.word_problems import (
    WordProblem,
    bound_program,
    consistent,
    held_out,
    inline_program,
    read_word_problems,
    to_problem,
)
from rocstar.data.wording import reworded
from rocstar.errors import ConfigError
from rocstar.types import Demonstration, Problem, ToolCall, ToolResult, seed_for

PLACEHOLDERS = tuple(f"n{index}" for index in range(MAX_NUMBERS))
"""Names of numbers, one token each."""
PROGRAMS = {"inline": inline_program, "bound": bound_program, "unordered": unordered_program}


class WordProblemTask:
    """Real questions, varied for training; held-out problems stay as they are in their file.

    Held out are the test files; without any, the development questions set aside by `data.holdout`, so that settings
    can be chosen without a look at the test. No RL problem equals a held-out one in question and numbers, but the
    published MAWPS folds repeat questions, and demonstrations are made of whatever the training files hold. Outputs in
    them are worked out, not run through `run` (see `demonstrate`); tests compare them with real runs."""

    def __init__(self, settings: DataSection, *, tool_name: str, seed: int, heldout: int) -> None:
        self._settings = settings
        self._tool_name = tool_name
        self._seed = seed
        self._count = heldout

    @property
    def atoms(self) -> tuple[str, ...]:
        named = self._settings.numbers == "masked" or self._settings.program == "bound"
        return PLACEHOLDERS if named else ()

    def problems(self) -> list[Problem]:
        known = {problem.id for problem in self.heldout()}
        drawn = training_problems(
            self._varied_rows,
            self._settings.pool,
            numbers=self._settings.numbers,
            variation=self._variation,
            seed=seed_for(self._seed, "problems"),
        )
        return list({problem.id: problem for problem in drawn if problem.id not in known}.values())

    def heldout(self) -> list[Problem]:
        """The first `evaluate.problems` of the different test problems, in a seeded order. Metadata `rows` says how
        often a problem stands in the files, `duplicate` whether its question was trained on."""
        training, development = self._parts
        rows = _read(self._settings.test_files) if self._settings.test_files else development
        seen = {row.template for row in training}
        problems = [self._asked(row, seen) for row in rows]
        repeats = Counter(problem.id for problem in problems)
        order = list({problem.id: _noted(problem, rows=repeats[problem.id]) for problem in problems}.values())
        random.Random(seed_for(self._seed, "heldout")).shuffle(order)
        return order[: self._count]

    async def demonstrations(self, count: int, run: Callable[[ToolCall], Awaitable[ToolResult]]) -> list[Demonstration]:
        return training_demonstrations(
            self._varied_rows,
            count,
            numbers=self._settings.numbers,
            variation=self._variation,
            seed=seed_for(self._seed, "demonstrations"),
            tool_name=self._tool_name,
            answer_share=self._settings.answer_share,
            program=PROGRAMS[self._settings.program],
        )

    @property
    def _variation(self) -> Variation:
        settings = self._settings
        return Variation(
            redraws=settings.redraws, distractor_share=settings.distractor_share, swap_share=settings.swap_share
        )

    @cached_property
    def _parts(self) -> tuple[list[WordProblem], list[WordProblem]]:
        """(training rows, development rows) of the training files."""
        if not self._settings.train_files:
            raise ConfigError("data.train_files is empty; give at least one CSV file of word problems")
        rows = consistent(_read(self._settings.train_files))[: self._settings.max_problems]
        if not rows:
            raise ConfigError("data.train_files hold no row whose equation gives its answer; check the files")
        return _set_aside(rows, self._settings.holdout, self._seed)

    @cached_property
    def _varied_rows(self) -> Sequence[WordProblem]:
        """Training rows in all their wordings, as often as they are shown in one pass."""
        settings = self._settings
        rows = oversampled(self._parts[0], settings.oversample)
        worded = reworded(
            rows,
            settings.wordings,
            rename_share=settings.rename_share,
            decoy_share=settings.decoy_share,
            shuffle_share=settings.shuffle_share,
            seed=seed_for(self._seed, "wordings"),
        )
        return [asked_twice(row) if settings.ask_twice else row for row in worded]

    def _asked(self, row: WordProblem, seen: set[str]) -> Problem:
        """A held-out row as a problem; looked up among the training questions before it is asked twice."""
        problem = to_problem(asked_twice(row) if self._settings.ask_twice else row, self._settings.numbers)
        return _noted(problem, template=row.template, duplicate=row.template in seen)


def _noted(problem: Problem, **facts: object) -> Problem:
    return replace(problem, metadata={**problem.metadata, **facts})


def _read(paths: Iterable[str]) -> list[WordProblem]:
    return [row for path in paths for row in read_word_problems(Path(path))]


def _set_aside(rows: list[WordProblem], count: int, seed: int) -> tuple[list[WordProblem], list[WordProblem]]:
    try:
        return held_out(rows, count, seed)
    except ValueError as error:
        raise ConfigError(f"{error}; lower data.holdout or give more files") from None
