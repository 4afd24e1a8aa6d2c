from fractions import Fraction
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.data.pool.rewording import asked_for_integer, integer_of, same_form
from rocstar.types import Problem, problem_id


def problem(answer: str) -> Problem:
    return Problem(id=problem_id("q"), question="q", answer=answer, metadata={"line": 1})


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("5", 5),
        ("$-7$", -7),
        ("\\[ 782 \\]", 782),
        ("1,013", 1013),
        ("1{,}013", 1013),
        ("10,\\!000", 10000),
        ("\\$5", 5),
        ("8.0", 8),
        ("n = 3", 3),
        ("\\frac{10}{2}", 5),
        ("36\\text{ cm}^2", 36),
        ("60^\\circ", 60),
        ("25\\%", 25),
        ("\u22124", -4),
    ],
)
def test_an_integer_is_read_however_it_is_written(answer: str, value: int) -> None:
    assert integer_of(answer) == value


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "3.5",
        "1,2",
        "1,01",
        "2^{3}",
        "\\frac{1}{2}",
        "x",
        "3 \\text{ or } 4",
        "12 \\text{ million}",
        "5\\pi",
        "9" * 401,
    ],
)
def test_what_is_no_single_integer_is_not_read_as_one(answer: str) -> None:
    assert integer_of(answer) is None


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_keep_the_value(value: int) -> None:
    assert integer_of(f"{value:,}") == integer_of(str(value)) == value


@given(st.integers(-999, 999), st.integers(2, 999))
def test_a_fraction_is_asked_for_as_the_sum_of_its_parts(top: int, bottom: int) -> None:
    exact = Fraction(top, bottom)
    asked = asked_for_integer(problem(f"\\frac{{{top}}}{{{bottom}}}"))
    if exact.denominator == 1:
        assert asked is None
    else:
        assert asked is not None
        assert asked.answer == str(exact.numerator + exact.denominator)
        assert asked.question.startswith("q ") and asked.id == problem_id(asked.question)
        assert asked.metadata["asked_from"] == f"\\frac{{{top}}}{{{bottom}}}"


@given(st.integers(1, 99), st.integers(2, 9999), st.integers(1, 99))
def test_a_root_is_asked_for_in_its_simplest_form(top: int, root: int, bottom: int) -> None:
    form = same_form(f"\\frac{{{top}\\sqrt{{{root}}}}}{{{bottom}}}")
    if "/" not in form or "sqrt" in form:
        assert round(sqrt(root)) ** 2 == root  # the root of a square is no root
        return
    p, q, r = map(int, form.split("/"))
    assert p * sqrt(r) / q == pytest.approx(top * sqrt(root) / bottom)
    assert all(r % (n * n) for n in range(2, 100))
    asked = asked_for_integer(problem(f"\\frac{{{top}\\sqrt{{{root}}}}}{{{bottom}}}"))
    assert asked is not None and asked.answer == str(p + q + r)


def test_equal_answers_have_the_same_form_and_others_do_not() -> None:
    assert same_form("\\dfrac{2}{4}") == same_form("1/2") != same_form("2/3")
    assert same_form("\\sqrt{12}") == same_form("2\\sqrt3") != same_form("2\\sqrt{2}")
    assert same_form("5") == same_form("5.0") != same_form("x")
