"""Programs made from published solutions: hand-made ones, and the share of real files that becomes programs."""

from __future__ import annotations

import gzip
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.layers import recipes_folder
from rocstar.config.sections import DataSection
from rocstar.support.plugins import load
from rocstar.types import Problem
from tests.published import DATA, WORD_PROBLEMS

GSM8K = DATA / "gsm8k" / "train.jsonl.gz"
MAWPS = WORD_PROBLEMS / "mawps_asdiv_a_train.csv.gz"


def published(name: str) -> Any:
    return load(f"published:{name}", folders=[recipes_folder() / "smollm2"])


@pytest.mark.parametrize(
    ("prefix", "program"),
    [
        ("- number0 * number1 number2", "9-4*2"),
        ("* number0 - number1 number2", "9*(4-2)"),
        ("- number0 - number1 number2", "9-(4-2)"),
        ("- - number0 number1 number2", "9-4-2"),
        ("/ + number0 number1 2.0", "(9+4)/2"),
        ("number1", "4"),
    ],
)
def test_an_equation_keeps_its_meaning_with_the_fewest_brackets(prefix: str, program: str) -> None:
    assert published("infix")(prefix.split(), ["9", "4", "2"]) == program


@pytest.mark.parametrize("prefix", ["- number0", "+ number0 number1 number2", "- number0 number7", ""])
def test_an_equation_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        published("infix")(prefix.split(), ["9", "4", "2"])


def test_marks_become_lines_and_results_keep_their_names() -> None:
    question = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?"
    solution = (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether.\n"
    )
    assert published("marked_program")(question, solution) == (
        "# Natalia sold clips in May.\na = 48/2\n# Natalia sold clips altogether.\nb = 48+a\nprint(b)"
    )


def test_a_cold_start_of_form_alone_knows_the_numbers_and_not_the_signs() -> None:
    guess, problem = published("_guess"), Problem(id="1", question="6 hens lay 4 eggs . 3 are sold .", answer="21")
    programs = {guess(problem, random.Random(seed)) for seed in range(200)}
    assert {"print(6+4)", "print(6*4)", "print(3-6)", "print(6*4-3)"} < programs
    assert all(re.fullmatch(r"print\([643]([-+*/][643]){1,2}\)", program) for program in programs)
    nothing = Problem(id="2", question="5 hens lay 0 eggs .", answer="0")
    assert "" in {guess(nothing, random.Random(seed)) for seed in range(50)}


def test_what_is_no_sum_becomes_no_program() -> None:
    for mark in ("<<__import__('os')=1>>1", "<<9**9**9=1>>1", "<<4/0=0>>0", "<<x+1=2>>2"):
        assert published("marked_program")("What?", f"It is {mark}.") == "", mark


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Problem]]:
    """The task, and every fifth of the problems that it reads."""
    if not GSM8K.exists():
        pytest.skip(f"needs {GSM8K}")
    file = tmp_path_factory.mktemp("gsm8k") / "train.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(gzip.decompress(GSM8K.read_bytes()).splitlines(keepends=True)[::5])))
    task = published("Gsm8k")
    return (made := task.__new__(task)), list(made.read(file))


def test_most_of_gsm8k_becomes_programs_that_print_the_published_answer(gsm8k: tuple[Any, list[Problem]]) -> None:
    assert len(gsm8k[1]) == 1495
    assert sum(bool(problem.metadata["program"]) for problem in gsm8k[1]) > 0.92 * 1495


@pytest.mark.skipif(not MAWPS.exists(), reason=f"needs {MAWPS}")
def test_all_but_a_few_word_problems_become_programs() -> None:
    task = published("WordProblems")
    problems = list(task.read(task.__new__(task), MAWPS))
    assert len(problems) == 3138
    assert sum(bool(problem.metadata["program"]) for problem in problems) >= 3130
    assert not any("number0" in problem.question for problem in problems)


STORIES = [
    ("Sara picked 9 pears . Tim picked 5 pears . How many pears did they pick together ?", "9+5"),
    ("There are 12 pears in a box . Dan takes 7 pears from it . How many pears are left ?", "12-7"),
    ("Dan has 24 apples . He shares them among 4 friends . How many apples does each friend get ?", "24/4"),
    ("Joan found 8 apples in 2 boxes . How many apples are in each box ?", "8/2"),
    ("Tom made 6 pears . How many pears and apples did Tom make ?", "6"),
    ("Tim bought 31 apples and 4 pears and ate 2 pears . How many pears are there now ?", "4-2"),
]


def word_variants(name: str) -> Any:
    return load(f"word_variants:{name}", folders=[recipes_folder() / "smollm2"])


def variants_of(seed: int) -> list[tuple[str, str, str, str]]:
    """(question, expression, its variant, the variant's expression) of every kind."""
    draw, rng = word_variants("Variants")([question for question, _ in STORIES]), random.Random(seed)
    return [(*story, *found) for story in STORIES for found in draw.of(word_variants("Asked")(*story), rng)]


SIGNED = ("colder", "lost", "worth", "rise", "gain")


def test_a_variant_asks_for_a_number_that_its_question_says_and_only_some_may_be_below_zero() -> None:
    found = [variants_of(seed) for seed in range(40)]
    assert min(map(len, found)) > len(STORIES)
    for question, expression, variant, new in (one for some in found for one in some):
        assert variant != question
        assert set(re.findall(r"\d+", new)) <= set(re.findall(r"\d+", variant))
        assert eval(new) > 0 or any(word in variant for word in SIGNED)
        assert eval(new) == int(eval(new)) or eval(expression) != int(eval(expression))
    values = [eval(new) for some in found for *_, new in some]
    assert 0.005 < sum(value < 0 for value in values) / len(values) < 0.03


def test_a_sentence_that_does_not_matter_changes_neither_question_nor_program() -> None:
    variants, asked = word_variants("Variants"), word_variants("Asked")(*STORIES[0])
    told = ["Sara picked 9 pears", "Tim picked 5 pears ."]
    draw = variants([f"There are 3 {thing} in it" for thing in ("pears", "plums") for _ in range(3)])
    for seed in range(20):
        found = draw.distracted(asked, random.Random(seed))
        assert found.expression == "9+5"
        *sentences, last = found.question.split(" . ")
        (new,) = [sentence for sentence in sentences if sentence not in told and f"{sentence} ." not in told]
        assert re.fullmatch(r"(Sara|Tim) picked [2-9] plums", new)
        assert last == "How many pears did they pick together ?"


def test_variants_of_training_questions_are_trained_on_and_tested_apart(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    rows = [
        f"Sara picked number0 pears . {name} picked number1 pears . How many did they pick ?,9 5,+ number0 number1,14"
        for name in ("Tim", "Ann", "Bob", "Eve", "Kim", "Lee", "Max", "Zoe")
    ]
    file.write_text("\n".join(["Question,Numbers,Equation,Answer", *rows]))

    def task(**options: Any) -> Any:
        section = DataSection(source="published:WordProblems", train_files=[str(file)], options=options)
        return published("WordProblems")(section, tool_name="python", seed=0, heldout=100)

    plain, varied = task(holdout=3), task(holdout=3, variants=2)
    assert [len(plain.problems()), len(plain.heldout())] == [5, 3]
    assert [len(varied.problems()), len(varied.heldout())] == [15, 9]
    assert {p.question for p in varied.problems()}.isdisjoint(p.question for p in varied.heldout())
    assert varied.problems() == task(holdout=3, variants=2).problems()
    assert len(varied.demonstrations(100)) == 15


NATALIA = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many in all?",
    "# Natalia sold clips in May.\na = 48/2\n# Of 48 and 24 clips in all.\nb = 48+a\nprint(b)",
)


def other_numbers(question: str, program: str, seed: int) -> Any:
    draw = load("number_variants:other_numbers", folders=[recipes_folder() / "smollm2"])
    return draw(question, program, random.Random(seed))


def test_question_program_and_comment_get_the_same_other_numbers() -> None:
    for seed in range(20):
        found = other_numbers(*NATALIA, seed)
        (n,) = map(int, re.findall(r"\d+", found.question))
        assert n != 48 and n % 2 == 0 and 24 <= n <= 105
        told = f"# Of {n} and {n // 2} clips in all."
        assert found.program == f"# Natalia sold clips in May.\na = {n}/2\n{told}\nb = {n}+a\nprint(b)"
        assert found.answer == n + n // 2


@pytest.mark.parametrize(
    ("question", "program"),
    [
        ("She ran 5 miles on Monday and 5 miles on Friday.", "a = 5+5\nprint(a)"),  # which 5 is which?
        ("She eats 7 pears a week.", "a = 7*7\nprint(a)"),  # a week has 7 days
        ("He was born in 1990 and left at 5 pm on May 3.", "a = 1990+5+3\nprint(a)"),
        ("He ate 2/3 of it.", "a = 2/3\nprint(a)"),
        ("She had 30 pears and gave away 18.", "a = 4*13\nprint(a)"),  # nothing tells where 13 is from
    ],
)
def test_numbers_that_may_mean_something_else_stay(question: str, program: str) -> None:
    assert all(other_numbers(question, program, seed) is None for seed in range(20))


def test_half_stays_because_it_is_its_own_rest() -> None:
    asked = ("A drawing for $160 is 50% dearer in color.", "a = 160*.5\nb = 160+a\nprint(b)")
    found = [other_numbers(*asked, seed) for seed in range(20)]
    assert all("50% dearer" in one.question and "*.5" in one.program for one in found)


def test_most_of_gsm8k_gets_a_variant_that_is_no_test_question(gsm8k: tuple[Any, list[Problem]]) -> None:
    made, value = gsm8k[0], lambda text: Fraction(text.replace(",", ""))
    problems = gsm8k[1][::16]  # fewer take as long, for the files are read
    known = {problem.id for problem in problems}
    variants = [one for one in made.with_variants(problems, 1) if one.id not in known]
    assert len(variants) > 0.55 * sum(bool(problem.metadata["program"]) for problem in problems)  # 61% here, 60% of all
    assert {one.id for one in variants}.isdisjoint(one.id for one in made.read(GSM8K.with_name("test.jsonl.gz")))
    assert all(published("_prints")(str(one.metadata["program"]), one.answer) for one in variants)
    assert all(value(one.answer) > 0 for one in variants if "." not in one.answer)
