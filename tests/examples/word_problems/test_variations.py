"""Varied word problems: other numbers, other order, more sentences, and still the same story."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.examples.word_problems.test_rows import ROW
from word_problems import rows as wp
from word_problems.expressions import exact, parse_prefix
from word_problems.variations import Variation, training_rows, with_distractor, with_redrawn_numbers

DONOR = wp.WordProblem(
    template="ann sold number0 of her number1 cakes . how many are left ?",
    numbers=(5, 9),
    tree=parse_prefix("- number1 number0"),
    answer=4,
)


def test_redrawn_numbers_tell_the_same_story() -> None:
    row = wp.WordProblem(
        template="number0 of number1 in number2 or number3 ?",
        numbers=(12, 4, 4, exact("2.5")),
        tree=parse_prefix("/ - number0 number1 number2"),
        answer=2,
    )
    for seed in range(60):
        new = with_redrawn_numbers(row, 0.6, random.Random(seed))
        assert new.is_consistent
        assert isinstance(new.answer, int)  # the division stays exact
        assert new.numbers[0] > new.numbers[1] == new.numbers[2] != new.numbers[3]
        assert new.numbers[3].denominator == 10 or new.numbers[3].denominator in (2, 5)
        assert 1 <= new.numbers[3] < 10
    assert len({with_redrawn_numbers(row, 0.6, random.Random(seed)).numbers for seed in range(50)}) > 40


def test_a_row_without_another_draw_stays_itself() -> None:
    row = replace(ROW, numbers=(1, 0, exact("0.3333")), tree=parse_prefix("+ number0 number2"), answer=exact("1.3333"))
    assert with_redrawn_numbers(row, 0.6, random.Random(0)) == row


def test_a_distractor_stands_before_the_question_and_changes_no_answer() -> None:
    row = with_distractor(ROW, DONOR, random.Random(0))
    assert row.template == (
        "tom has number0 boxes of number1 pens . he saw number2 cats . "
        "ann sold number3 of her number4 cakes . how many pens has he ?"
    )
    assert (row.numbers, row.value, row.unused_numbers) == ((8, 4, 3, 5, 9), ROW.value, 3)
    asked_late = replace(ROW, template="tom has number0 boxes . how many pens at number1 a box and number2 ?")
    row = with_distractor(asked_late, DONOR, random.Random(0))  # slots are numbered by appearance
    assert row.template.endswith("ann sold number1 of her number2 cakes . how many pens at number3 a box and number4 ?")
    assert row.numbers == (8, 5, 9, 4, 3) and row.is_consistent


@pytest.mark.parametrize("donor", [replace(DONOR, numbers=(8, 9)), replace(DONOR, template="number0 and number1 ?")])
def test_an_unfit_distractor_is_left_out(donor: wp.WordProblem) -> None:
    assert with_distractor(ROW, donor, random.Random(0)) == ROW


def test_passes_over_the_rows_are_shuffled_repeatable_and_cycle_their_drawings() -> None:
    rows = [replace(ROW, template=f"{n} number0 number1 number2", source=str(n)) for n in range(20)]
    variation = Variation(redraws=2, original_share=0.0)
    drawn = list(training_rows(rows, 80, variation, seed=3))
    assert drawn == list(training_rows(rows, 80, variation, seed=3))
    passes = [drawn[start : start + 20] for start in (0, 20, 40, 60)]
    assert all(sorted(int(row.source) for row in one) == list(range(20)) for one in passes)
    assert [row.source for row in passes[0]] != [row.source for row in passes[1]]

    first, second, third, _ = (sorted(one, key=lambda row: row.source) for one in passes)
    assert first == third != second
    assert all(row.numbers == (8, 4, 3) for row in training_rows(rows, 20, Variation(redraws=0), seed=3))
