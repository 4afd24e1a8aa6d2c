"""reasoning-gym's generators as problems, and their scorers as a verifier."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning_gym has an environment of its own: scripts/adapters_env")

from reasoning_gym.factory import DATASETS

from rocstar.adapters.reasoning_gym import Generator, score
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import DataSection
from rocstar.errors import ConfigError
from rocstar.run.material import task_of
from rocstar.run.tasks import require_demonstrations
from rocstar.types import Problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "environments" / "generators.toml"
WITHOUT_AN_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Generators that have a scorer and no answer of their own."""
UNTRUSTED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("coin_flip", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""Generators whose scorers evaluate the model's text, or make a number of any size of it."""
REFUSED = {"composite": "Must specify at least one dataset", "game_of_life_halting": "any text full score"}


def task(
    name: str, *, pool: int = 1, seed: int = 0, heldout: int = 1, trusted: bool = True, **config: Any
) -> Generator:
    options = {"name": name, "config": config, "trusted": trusted}
    data = DataSection(source="rocstar.adapters.reasoning_gym:Generator", options=options, pool=pool)
    return Generator(data, tool_name="python", seed=seed, heldout=heldout)


def scored(problem: Problem, answer: str) -> float:
    return score(problem.source, f"So \\boxed{{{answer}}}.", problem.answer, problem.metadata)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_generator_loads_and_its_own_answers_are_right_and_others_wrong(name: str) -> None:
    """Scorers that the model's text can run or hold up are refused unless trusted."""
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            task(name)
        return
    if name in UNTRUSTED:
        with pytest.raises(ConfigError, match="evaluates the model's text as Python"):
            task(name, trusted=False)
    made = task(name, trusted=name in UNTRUSTED)
    for problem in (*made.problems(), *made.heldout()):
        assert problem.question
        assert scored(problem, problem.answer) == (name not in WITHOUT_AN_ANSWER)
        assert scored(problem, "banana") == scored(problem, "") == scored(problem, "\\frac{") == 0.0
        assert score(problem.source, f"So {problem.answer}.", problem.answer, problem.metadata) == 0.0  # no box


def test_seed_and_size_decide_the_problems_and_held_out_ones_are_others() -> None:
    made, again, other = (task("gcd", pool=50, heldout=20, seed=seed) for seed in (1, 1, 2))
    assert made.problems() == again.problems() and len(made.problems()) == 50
    assert made.heldout() == other.heldout() and len(made.heldout()) == 20
    ids = [{problem.id for problem in problems} for problems in (made.problems(), other.problems(), made.heldout())]
    assert not ids[0] & ids[2] and not ids[1] & ids[2] and ids[0] != ids[1]
    assert task("gcd", pool=60, seed=1, heldout=20).problems()[:50] == made.problems()


def test_a_part_of_the_full_score_is_wrong() -> None:
    (problem,) = task("basic_arithmetic").problems()
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
        ("gcd", {"seed": 5}, "data.options.config.seed is the run's to say; set run.seed or"),
        ("gcd", {"size": 5}, "data.options.config.size is the run's to say; set run.seed or"),
    ],
)
def test_what_a_generator_does_not_take_is_refused(name: str, config: dict[str, Any], told: str) -> None:
    data = DataSection(source="rocstar.adapters.reasoning_gym:Generator", options={"name": name, "config": config})
    with pytest.raises(ConfigError, match=r"data\.options") as caught:
        Generator(data, tool_name="python", seed=0, heldout=1)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_examples_demonstrations_end_in_what_the_scorers_accept_and_in_guesses() -> None:
    recipe = load_recipe(EXAMPLE, ["evaluate.problems=30"])
    made = task_of(recipe, recipe)
    shown = require_demonstrations(made, "sft").demonstrations(1000)
    assert len(shown) == 1000 and not {one.problem.id for one in shown} & {one.id for one in made.heldout()}
    right: Counter[str] = Counter()
    for one in shown:
        last = one.turns[-1].text
        assert score(one.problem.source, last, "", one.problem.metadata) == 1.0 or len(one.turns) == 1, one
        right[one.problem.metadata["family"]] += len(one.turns) > 1
    assert len(right) == 10 == len(recipe.data.options) and min(right.values()) > 40
    asked: Any = sys.modules[type(made).__module__]
    for told in {"decimal_value": 0, "source_repr": ""}, {"variable": "c", "equation": "0 = 0"}:
        entry = {"entry": {"metadata": told}}
        assert not asked._has_an_answer(Problem(id="", question="", answer="7", source="", metadata=entry))


def test_the_example_trains_on_as_many_problems_of_each_generator_and_refuses_one_without_a_program() -> None:
    recipe = load_recipe(EXAMPLE, ["evaluate.problems=30", "data.pool=100"])
    made = task_of(recipe, recipe)
    for problems, each in ((made.problems(), 10), (made.heldout(), 3)):
        assert Counter(Counter(problem.metadata["family"] for problem in problems).values()) == {each: 10}
    with pytest.raises(ConfigError, match="names sudoku; there are programs for"):
        task_of(refused := load_recipe(EXAMPLE, ["data.options.sudoku={}"]), refused)
