"""reasoning-gym's generators as problems, and their scorers as a verifier."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning_gym has an environment of its own: scripts/adapters_env")

from reasoning_gym.factory import DATASETS

from rocstar.adapters.reasoning_gym import Generator, score
from rocstar.config.sections import DataSection
from rocstar.errors import ConfigError
from rocstar.types import Problem

WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Generators that have a scorer and no answer of their own."""
UNTRUSTED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("coin_flip", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""Generators whose scorers evaluate the model's text, or make a number of any size of it."""
REFUSED = {"composite": "Must specify at least one dataset", "game_of_life_halting": "any text full score"}


def task(
    name: str, *, pool: int = 2, seed: int = 0, heldout: int = 1, trusted: bool = True, **config: Any
) -> Generator:
    options = {"name": name, "config": config, "trusted": trusted}
    data = DataSection(source="rocstar.adapters.reasoning_gym:Generator", options=options, pool=pool)
    return Generator(data, tool_name="python", seed=seed, heldout=heldout)


def scored(problem: Problem, answer: str) -> float:
    return score(problem.source, f"So \\boxed{{{answer}}}.", problem.answer, problem.metadata)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_generator_loads_and_its_own_answers_are_right_and_others_wrong(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            task(name)
        return
    made = task(name)
    for problem in (*made.problems(), *made.heldout()):
        assert problem.question
        assert scored(problem, problem.answer) == (name not in WITHOUT_AN_ANSWER)
        assert scored(problem, "banana") == scored(problem, "") == scored(problem, "\\frac{") == 0.0
        assert score(problem.source, f"So {problem.answer}.", problem.answer, problem.metadata) == 0.0  # no box


def test_scorers_that_the_models_text_can_run_or_hold_up_are_refused_unless_trusted() -> None:
    refused = set()
    for name in DATASETS:
        try:
            task(name, heldout=0, trusted=False)
        except ConfigError as error:
            if "evaluates the model's text as Python" in str(error):
                refused.add(name)
    assert refused == UNTRUSTED


def test_seed_and_size_decide_the_problems_and_held_out_ones_are_others() -> None:
    made, again, other = (task("gcd", pool=50, heldout=20, seed=seed) for seed in (1, 1, 2))
    assert made.problems() == again.problems() and len(made.problems()) == 50
    assert made.heldout() == other.heldout() and len(made.heldout()) == 20
    ids = [{problem.id for problem in problems} for problems in (made.problems(), other.problems(), made.heldout())]
    assert not ids[0] & ids[2] and not ids[1] & ids[2] and ids[0] != ids[1]
    assert task("gcd", pool=60, seed=1, heldout=20).problems()[:50] == made.problems()


def test_a_part_of_the_full_score_is_wrong() -> None:
    (problem,) = task("basic_arithmetic", pool=1).problems()
    assert scored(problem, problem.answer) == 1.0
    assert scored(problem, f"{problem.answer} or so") == 0.0


def test_a_generator_that_runs_out_gives_each_question_once() -> None:
    small = task("gcd", pool=40, heldout=3, min_numbers=2, max_numbers=2, min_value=1, max_value=3)
    ids = [problem.id for problem in (*small.problems(), *small.heldout())]
    assert len(ids) == len(set(ids)) == 9


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("gdc", {}, "'gdc' is no generator; did you mean 'gcd'?"),
        ("gcd", {"numbers": 3}, "gcd refuses it"),
        ("gcd", {"min_numbers": 1}, "gcd refuses it"),
    ],
)
def test_what_a_generator_does_not_take_is_refused(name: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.options") as caught:
        task(name, **config)
    assert told in str(caught.value) and "\n" not in str(caught.value)
