"""Programs made from published solutions: hand-made ones, and the share of real files that becomes programs."""

from __future__ import annotations

import gzip
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.shipped import recipes_folder
from rocstar.support.plugins import load

DATA = Path(__file__).parents[2].parent / "shared" / "data"
GSM8K = DATA / "gsm8k" / "train.jsonl.gz"
MAWPS = DATA / "word_problems" / "mawps_asdiv_a_train.csv.gz"


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


@pytest.mark.parametrize("mark", ["<<__import__('os')=1>>1", "<<9**9**9=1>>1", "<<4/0=0>>0", "<<x+1=2>>2"])
def test_what_is_no_sum_becomes_no_program(mark: str) -> None:
    assert published("marked_program")("What?", f"It is {mark}.") == ""


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs {GSM8K}")
def test_most_of_gsm8k_becomes_programs_that_print_the_published_answer() -> None:
    problems = list(published("Gsm8k").read(published("Gsm8k").__new__(published("Gsm8k")), GSM8K))
    assert len(problems) == 7473
    assert sum(bool(problem.metadata["program"]) for problem in problems) > 6900


@pytest.mark.skipif(not MAWPS.exists(), reason=f"needs {MAWPS}")
def test_all_but_a_few_word_problems_become_programs() -> None:
    task = published("WordProblems")
    problems = list(task.read(task.__new__(task), MAWPS))
    assert len(problems) == 3138
    assert sum(bool(problem.metadata["program"]) for problem in problems) >= 3130
    assert all(Fraction(problem.answer) is not None for problem in problems)
    with gzip.open(MAWPS, "rt") as lines:
        assert "number0" in lines.readlines()[1]
    assert not any("number0" in problem.question for problem in problems)
