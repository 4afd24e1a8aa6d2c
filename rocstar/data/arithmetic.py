"""Synthetic arithmetic problems drawn from the task families. The families themselves are in `families.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from difflib import get_close_matches

from rocstar.data.families import FAMILIES, Family
from rocstar.errors import ConfigError
from rocstar.types import Problem, problem_id, seed_for

MAX_REPEATS = 1000  # draws in a row that gave only known questions: the family has nothing new left


def arithmetic_problems(
    families: Sequence[str], count: int, seed: int, exclude: Set[str] = frozenset()
) -> list[Problem]:
    """`count` problems with distinct questions, the families taking turns.

    `exclude` holds ids of problems that must not appear, so that training and held-out problems never share a
    question. Metadata: `family` (name) and `operands` (name to integer). Raises ConfigError for an unknown family,
    for no family at all, and when a family has no new question left. Source: ours.
    """
    chosen = [_family(name) for name in families]
    if not chosen:
        raise ConfigError(f"data.families is empty; name at least one of {', '.join(FAMILIES)}.")
    rngs = [random.Random(seed_for(seed, "arithmetic", family.name)) for family in chosen]
    seen = set(exclude)
    problems: list[Problem] = []
    for n in range(count):
        problem = _new_problem(chosen[n % len(chosen)], rngs[n % len(chosen)], seen)
        seen.add(problem.id)
        problems.append(problem)
    return problems


def _family(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
    nearest = get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
    raise ConfigError(f"data.families names {name!r}, which is unknown; the nearest is {nearest!r}.")


def _new_problem(family: Family, rng: random.Random, seen: Set[str]) -> Problem:
    for _ in range(MAX_REPEATS):
        problem = _draw(family, rng)
        if problem.id not in seen:
            return problem
    raise ConfigError(
        f"data.families {family.name!r} gave no new question in {MAX_REPEATS} draws; "
        "lower data.pool or evaluate.problems, or add families."
    )


def _draw(family: Family, rng: random.Random) -> Problem:
    operands = family.draw(rng)
    question = rng.choice(family.phrasings).format(**operands)
    return Problem(
        id=problem_id(question),
        question=question,
        answer=str(family.solve(operands)),
        source="arithmetic",
        metadata={"family": family.name, "operands": dict(operands)},
    )
