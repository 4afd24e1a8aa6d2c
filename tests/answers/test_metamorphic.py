"""What must not change a verdict, and what must: generated answers through all graders and a real worker."""

import random
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rocstar.answers.grade import Grader, Pair
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.types import Verdict

RIGHT, WRONG = Verdict.RIGHT, Verdict.WRONG
few = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

digits = st.integers(2, 97)
primes = st.sampled_from([2, 3, 5, 7, 11, 13])
FORMULAS = (
    "{a}+{b}\\sqrt{{{p}}}",
    "\\frac{{{a}\\pi}}{{{b}}}",
    "{a}x^2+{b}y",
    "\\frac{{{a}x+{b}}}{{{p}}}",
    "({a}, {b}\\sqrt{{{p}}})",
    "[{a}, {a}{b})",
    "\\{{{a}, {a}{b}, x\\}}",
    "x = {a}\\ln {p}",
    "\\begin{{pmatrix}}{a}&{b}\\\\0&\\frac{{1}}{{{p}}}\\end{{pmatrix}}",
)
UNITS = [("m", "cm", 100), ("km", "meters", 1000), ("hours", "minutes", 60), ("kg", "g", 1000), ("feet", "inches", 12),
         ("weeks", "days", 7), ("liters", "ml", 1000), ("dollars", "cents", 100)]  # fmt: skip
items = st.one_of(st.integers(-50, 50).map(str), primes.map("\\sqrt{{{}}}".format))
formulas = st.builds(
    lambda form, a, b, p: form.format(a=a, b=b, p=p), st.sampled_from(FORMULAS), digits, digits, primes
)


@pytest.fixture
def grader(checker: SymbolicChecker) -> Grader:
    return Grader(checker)


def verdicts(grader: Grader, *pairs: tuple[str, str]) -> list[Verdict]:
    return [grade.verdict for grade in grader.grade_now([Pair(gold=gold, predicted=given) for gold, given in pairs])]


def forms(value: Fraction) -> list[str]:
    """Ways to write a fraction."""
    top, bottom = value.numerator, value.denominator
    found = [
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        rf"$\dfrac{{{3 * top}}}{{{3 * bottom}}}$",
        f"x = {top}/{bottom}",
    ]
    if bottom == 1:
        found += [
            f"{top}",
            f"{top:,}",
            f"{top}.0",
            f"+{top}" if top > 0 else f"{top}",
            rf"{top}\text{{ apples}}",
            f"\\({top}\\)",
        ]
    if top > bottom > 1:
        found.append(rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}")
    if 100 % bottom == 0:
        found += [f"{float(value):.2f}", f"{100 * top // bottom}\\%"]
    return found


def noisy(text: str, draw: random.Random) -> str:
    """The same answer with marks that change its looks only."""
    pieces = {"(": ["\\left(", "( ", "\\bigl( "], ")": ["\\right)", " )", "\\bigr)"], "=": [" = "],
              ",": [", ", ",\\ ", ", \\, "],
              "+": [" + ", "\u200b+"], "[": ["\\left["], "\\frac": ["\\dfrac", "\\tfrac"]}  # fmt: skip
    for plain, others in pieces.items():
        if draw.random() < 0.7:
            text = text.replace(plain, draw.choice(others))
    around = draw.choice(["{}", " {} ", "${}$", "\\({}\\)", "{}.", "\n{}\n", "\u202b{}\u202c", "$$ {} $$"])
    return around.replace("{}", text)


def change_a_digit(text: str, draw: random.Random) -> str:
    """Each number of FORMULAS stands for itself, so another digit is another value; never a leading zero."""
    places = [at for at, letter in enumerate(text) if letter.isdigit()]
    at = draw.choice(places)
    other = draw.choice([digit for digit in "123456789" if digit != text[at]])
    return text[:at] + other + text[at + 1 :]


@few
@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=40), st.randoms(use_true_random=False))
def test_equal_forms_of_a_number_agree_both_ways(grader: Grader, value: Fraction, draw: random.Random) -> None:
    first, second = draw.choice(forms(value)), draw.choice(forms(value))
    assert verdicts(grader, (first, second), (second, first)) == [RIGHT, RIGHT]


@few
@given(
    st.fractions(-1000, 1000, max_denominator=40),
    st.fractions(-1000, 1000, max_denominator=40),
    st.randoms(use_true_random=False),
)
def test_different_numbers_never_agree(grader: Grader, value: Fraction, other: Fraction, draw: random.Random) -> None:
    assume(value not in (other, 100 * other, other / 100))  # a percent may stand for either
    first, second = draw.choice(forms(value)), draw.choice(forms(other))
    assert verdicts(grader, (first, second), (second, first)) == [WRONG, WRONG]


@few
@given(st.lists(items, min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_a_set_may_be_reordered_and_a_tuple_may_not(grader: Grader, of: list[str], draw: random.Random) -> None:
    shuffled = draw.sample(of, len(of))
    as_list, as_set, as_tuple = ", ".join, (lambda x: rf"\{{{', '.join(x)}\}}"), (lambda x: f"({', '.join(x)})")
    assert verdicts(grader, (as_set(of), as_set(shuffled)), (as_set(of), as_list(shuffled))) == [RIGHT, RIGHT]
    assert verdicts(grader, (as_tuple(of), as_tuple(shuffled))) == [RIGHT if shuffled == of else WRONG]
    more = [*of, "77"]
    assert verdicts(grader, (as_set(of), as_set(more)), (as_set(more), as_set(of))) == [WRONG, WRONG]


@few
@given(st.integers(1, 9999), st.sampled_from(UNITS))
def test_rescaled_units_keep_the_verdict(grader: Grader, amount: int, units: tuple[str, str, int]) -> None:
    large, small, factor = units
    gold = rf"{amount}\text{{ {large}}}"
    same, unscaled, off = (rf"{n}\text{{ {small}}}" for n in (amount * factor, amount, amount * factor + 1))
    assert verdicts(grader, (gold, same), (same, gold)) == [RIGHT, RIGHT]
    assert verdicts(grader, (gold, unscaled), (gold, off), (off, gold)) == [WRONG, WRONG, WRONG]


@few
@given(formulas, st.randoms(use_true_random=False))
def test_noise_in_the_writing_keeps_the_verdict(grader: Grader, formula: str, draw: random.Random) -> None:
    assert verdicts(grader, (formula, noisy(formula, draw)), (noisy(formula, draw), formula)) == [RIGHT, RIGHT]


@few
@given(formulas, st.randoms(use_true_random=False))
def test_a_changed_digit_flips_the_verdict_and_noise_does_not_hide_it(
    grader: Grader, formula: str, draw: random.Random
) -> None:
    changed = change_a_digit(formula, draw)
    pairs = (formula, changed), (changed, formula), (formula, noisy(changed, draw))
    assert verdicts(grader, *pairs) == [WRONG, WRONG, WRONG]


@few
@given(st.integers(-(10**30), 10**30), st.randoms(use_true_random=False))
def test_a_changed_digit_of_any_integer_is_wrong(grader: Grader, value: int, draw: random.Random) -> None:
    changed = change_a_digit(str(value), draw)
    assert verdicts(grader, (str(value), changed), (changed, str(value))) == [WRONG, WRONG]
