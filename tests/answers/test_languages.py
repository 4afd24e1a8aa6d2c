# ruff: noqa: RUF001
"""Answers in other languages than English, by the graders that rewards use."""

import pytest

from rocstar.answers.grade import Grader, Pair
from rocstar.types import Verdict

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED

CASES = {
    "digits and signs": [
        ("42", "٤٢", RIGHT),
        ("3.5", "٣٫٥", RIGHT),
        ("٣٫٥", "3.6", WRONG),
        ("1234", "١٬٢٣٤", RIGHT),
        ("1, 2, 3", "1、2、3", RIGHT),
        ("ℝ", r"\mathbb{R}", RIGHT),
        ("ℝ", r"\mathbb{Z}", WRONG),
        ("ℝ∖{0}", r"\mathbb{R}\setminus\{0\}", RIGHT),
        ("10 \u00b5m", r"0.01\text{ mm}", RIGHT),
        ("10 \u00b5m", "10 mm", WRONG),
        ("25℃", "25 °C", RIGHT),
        ("5", "5∫x", WRONG),
        ("2", "2→x", WRONG),
        ("3", "3⊕A", WRONG),
    ],
    "words": [
        ("是", "否", WRONG),
        ("北京", "北京", RIGHT),
        ("北京", "42", WRONG),
        ("да", "Да", RIGHT),
        ("да", "нет", WRONG),
        ("हाँ", "नहीं", WRONG),
        ("ja", "Ja", RIGHT),
        ("M\u00fcller", "Mu\u0308ller", RIGHT),
        ("🍎", "🍐", WRONG),
        ("四十二", "42", UNDECIDED),  # nobody can read it; "words" would make the right number wrong
    ],
    "units": [
        ("5", "5元", RIGHT),
        ("5", r"5\text{ Äpfel}", RIGHT),
        ("5 Stück", "5", RIGHT),
        ("5个", "6", WRONG),
        ("5元", "5美元", WRONG),
        ("3米", "3厘米", WRONG),
        ("3 🍎", "3 🍐", WRONG),
        ("4500元", "4,500元", RIGHT),
        ("7.5 км", "7,5 км", RIGHT),
        ("2.5", r"2,5\text{ Äpfel}", RIGHT),
        ("25", r"2,5\text{ Äpfel}", WRONG),
        ("7.5 км", "7,5 м", WRONG),
        ("2.5", "2,5万", WRONG),
        (r"3\text{千米}", "3", RIGHT),
        (r"3\text{千米}", r"3\text{ km}", RIGHT),
    ],
    "other numbers": [
        ("5", r"5\text{万}", WRONG),
        ("5", "5万", WRONG),
        ("5", r"5\text{ Millionen}", WRONG),
        ("5", r"5\text{ mil}", WRONG),
        ("5", "5 тысяч", WRONG),
        ("5", r"5\text{ Drittel}", WRONG),
        ("5", "5以上", WRONG),
        ("5", "5割", WRONG),
        ("5", "5 triệu", WRONG),
        ("5", "5倍", RIGHT),
        ("5", r"5\text{ oder 6}", WRONG),
        ("5万", "5", UNDECIDED),
        (r"5\text{万}", r"5\text{ 万}", RIGHT),
    ],
    "names with an index": [
        ("x_1=1, y_1=2", "x_1=2, y_1=1", WRONG),
        ("x_1=1, y_1=2", "y_1=2, x_1=1", RIGHT),
        ("x_1 = 5", "x = 5", RIGHT),
    ],
}


@pytest.mark.parametrize("kind", CASES)
def test_an_answer_in_another_language_gets_the_verdict_of_its_meaning(kind: str) -> None:
    cases = CASES[kind]
    grades = Grader().grade_now([Pair(gold=gold, predicted=predicted) for gold, predicted, _ in cases])
    found = [(gold, said, grade.verdict) for (gold, said, _), grade in zip(cases, grades, strict=True)]
    assert found == cases
