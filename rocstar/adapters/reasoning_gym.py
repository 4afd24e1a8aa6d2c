"""reasoning-gym's generators as problems, their scorers as the verifier: the last box of what a model wrote is scored,
and only full score is right. Tested with 0.1.25.

    data.source = "rocstar.adapters.reasoning_gym:Generator"
    evaluate.verifier = "rocstar.adapters.reasoning_gym:score" """

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Set
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import reasoning_gym
from pydantic import BaseModel
from reasoning_gym.factory import DATASETS

from rocstar.adapters.environments import options_in, source_of
from rocstar.answers.extract import boxed_answer
from rocstar.config.sections import TaskSection
from rocstar.errors import ConfigError
from rocstar.run.tasks import DrawnTask, checked_options
from rocstar.types import Problem, problem_id

UNSAFE = re.compile(r"\b(?:eval|parse_expr|Fraction)\(answer\b")
"""In the source of a scorer: it evaluates what the model wrote as Python, or makes a number of any size of it."""
SEEDS = 1 << 31  # numpy takes no larger ones
MOST_REPEATS = 20  # a generator may draw a question again; after so many draws for each one wanted it has no more


class GeneratorOptions(BaseModel):
    name: str
    config: dict[str, Any] = {}  # of the generator
    trusted: bool = False
    """Allow a scorer that evaluates the model's text, or makes a number of any size of it, in this process."""


class Generator(DrawnTask):
    """`data.pool` problems, and held-out ones of another seed. Raises ConfigError."""

    def __init__(self, data: TaskSection, *, tool_name: str, seed: int, heldout: int) -> None:
        options = checked_options(GeneratorOptions, data)
        if options.name not in DATASETS:
            close = get_close_matches(options.name, DATASETS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"data.options.name = {options.name!r} is no generator; did you mean {close!r}?")
        for own in options.config.keys() & {"seed", "size"}:
            raise ConfigError(f"data.options.config.{own} is the run's to say; set run.seed or data.pool instead")
        file = inspect.getfile(DATASETS[options.name][0])
        if not options.trusted and UNSAFE.search(Path(file).read_text(encoding="utf-8")):
            raise ConfigError(
                f"data.options.name = {options.name!r}: its scorer evaluates the model's text as Python, or makes a "
                "number of any size of it, in this process; set data.options.trusted=true to allow that"
            )
        self._source = source_of("reasoning_gym", {"name": options.name, "config": options.config})
        if full(self._source, "no answer", dataset(self._source, 0, 1)[0]):
            raise ConfigError(f"data.options.name = {options.name!r}: its scorer gives any text full score")
        super().__init__(data, tool_name=tool_name, seed=seed, heldout=heldout)

    def drawn(self, count: int, seed: int, exclude: Set[str] = frozenset()) -> list[Problem]:
        drawn: dict[str, Problem] = {}
        made = dataset(self._source, seed % SEEDS, count * MOST_REPEATS or 1)
        for entry in map(made.__getitem__, range(count * MOST_REPEATS)):
            name = problem_id(entry["question"])
            if name not in exclude:
                answer = "" if entry["answer"] is None else str(entry["answer"])  # not all scorers have one
                drawn[name] = Problem(
                    id=name, question=entry["question"], answer=answer, source=self._source, metadata={"entry": entry}
                )
            if len(drawn) == count:
                break
        return list(drawn.values())


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1.0 for the generator's full score and 0.0 else; verl's signature."""
    answer = boxed_answer(solution_str)
    return float(answer is not None and full(data_source, answer, extra_info["entry"]))


def full(source: str, answer: Any, entry: Mapping[str, Any]) -> bool:
    """Whether the generator's scorer gives an answer full score."""
    try:
        return bool(dataset(source, 0, 1).score_answer(answer, entry) >= 1)
    except Exception:  # caused by the model's text: as a fault, a policy could provoke it to leave its group
        return False


@functools.lru_cache(maxsize=16)
def dataset(source: str, seed: int, size: int) -> Any:
    """Raises ConfigError for settings that the generator does not take."""
    options = options_in(source)
    try:
        return reasoning_gym.create_dataset(options["name"], seed=seed, size=size, **options["config"])
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"data.options.config = {options['config']}: {options['name']} refuses it: {error}") from None
