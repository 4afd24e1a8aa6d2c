from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.answers.numbers import compare_numbers, parse_number
from rocstar.types import Verdict

RIGHT, WRONG = Verdict.RIGHT, Verdict.WRONG


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("\u22123", -3),
        ("004", 4),
        ("5.", 5),
        (".5", Fraction(1, 2)),
        ("7,425,000", 7425000),
        ("14{,}916", 14916),
        (r"11,\! 111,\! 111,\! 100", None),
        (r"14,\!916", 14916),
        ("1 000", 1000),
        ("1.000.000", 1_000_000),
        ("1'000", 1000),
        ("2,50,000", 250_000),
        ("1.250,75", Fraction(125_075, 100)),
        (r"2\text{ and }\frac{1}{4}", Fraction(9, 4)),
        (r"\text{EUR }15", 15),
        ("$1,000.99$", Fraction(100099, 100)),
        (r"\frac{14}{3}", Fraction(14, 3)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("2 1/2", Fraction(5, 2)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("x = 5", 5),
        (r"90^\circ", 90),
        (r"15\text{ cm}^2", 15),
        (r"\$3\text{ million}", 3_000_000),
        (r"7.8\times 10^2", 780),
        ("10^{6}", 1_000_000),
        ("204_5", 54),
        (r"3A_{16}", 58),
        ("1021_{(4)}", 73),
        ("1e-05", Fraction(1, 100_000)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"-2.1\overline{6}", Fraction(-13, 6)),
    ],
)
def test_light_latex_is_read_exactly(text: str, value: Fraction | int | None) -> None:
    number = parse_number(text)
    assert (number.value if number else None) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "1/0", "1+1", "2^{10}", "9^{9^{9}}", "10^{99999}", "(1,2)", "1,22,3", "1,00,0000", "12.34.567",
     "1.234,567.8", r"\sqrt{2}", "208_5", "1_1", "5!",
     "12:00", "2\\pi", r"5\text{ or }6", "0.64N", "2e", "1e9999", "0x10", "nan",
     "9" * 10_000, "9^" * 100_000, "٣", "\x00", "1\x002"],
)  # fmt: skip
def test_anything_else_is_not_a_plain_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ("18", "18", (RIGHT, "integer")),
        ("18", r"18\text{ dollars}", (RIGHT, "integer")),
        ("1/2", "0.5", (RIGHT, "number")),
        ("204_5", "204_{5}", (RIGHT, "integer")),
        ("204_5", "204_6", (WRONG, "integer")),
        ("204_5", "1204_3", (WRONG, "not_a_number")),
        ("204_5", "204", None),
        ("10%", "10", (RIGHT, "integer")),
        ("10%", "0.1", (RIGHT, "number")),
        ("1/3", "0.33", (WRONG, "number")),
        ("1/3", "0.333333", (RIGHT, "number")),
        ("8/3", "2.6667", (RIGHT, "number")),
        ("2.6666", r"\frac{8}{3}", (RIGHT, "number")),
        ("8/3", "2.6668", (WRONG, "number")),
        ("1/2", "0.50001", (WRONG, "number")),
        (r"0.\overline{3}", "1/3", (RIGHT, "number")),
        ("0.333333", "0.3333333333", (RIGHT, "number")),
        ("0.333333", "0.333334", (WRONG, "number")),
        ("5", "4.999999999999999", (RIGHT, "number")),
        ("0.0000001", "0.0000002", (WRONG, "number")),
        ("1000.99", "1000,99", (RIGHT, "number")),
        ("1234567", "1234,567", (WRONG, "number")),
        ("12500", "1,2500", (WRONG, "number")),
        ("12500", "12.500", (WRONG, "number")),
        ("1,22", "22,1", None),
        ("x=5", "y=5", None),
        ("150 min", "2,5 h", (RIGHT, "unit")),
        ("3500 m", "3,500 m", (RIGHT, "integer")),
        ("3.5 m", "3,500 m", (WRONG, "number")),
        ("5 m", "5,0 m", (RIGHT, "integer")),
        ("5", "5,0", (WRONG, "number")),
        ("5,0", "5", None),
        ("5x", "5,0x", None),
        ("150 min", "2, 5 h", None),
        (r"5\text{ m}", r"500\text{ cm}", (RIGHT, "unit")),
        (r"5\text{ m}", r"5\text{ cm}", (WRONG, "unit")),
        ("2 hours", "120 minutes", (RIGHT, "unit")),
        (r"1\text{ m}^2", r"10000\text{ square cm}", (RIGHT, "unit")),
        ("1 liter", r"1000\text{ cm}^3", (RIGHT, "unit")),
        (r"\$5", "500 cents", (RIGHT, "unit")),
        (r"\$5", "5$", (RIGHT, "integer")),
        (r"\$5", r"5\text{ euros}", (WRONG, "unit")),
        (r"5\text{ m}", r"5\text{ kg}", (WRONG, "unit")),
        (r"5\text{ m}", "500cm", (RIGHT, "unit")),
        ("90 km/h", r"25\ \mathrm{m s^{-1}}", (RIGHT, "unit")),
        (r"50\%", r"50\text{ cm}", (WRONG, "unit")),
        ("20^\\circ C", "20 degrees Celsius", (RIGHT, "unit")),
        ("20^\\circ C", "20 K", (WRONG, "unit")),
        (r"2\text{ h }15\text{ min}", "135 min", (RIGHT, "unit")),
        ("12.25^\\circ", "12^\\circ 15'", (RIGHT, "number")),
        ("45", r"45\text{ radians}", (WRONG, "unit")),
        ("45^\\circ", r"45\text{ radians}", None),
        ("0.2", r"0.2\%", (WRONG, "number")),
        ("0.2", r"20\%", (RIGHT, "number")),
        (r"5\text{ cats}", r"5\text{ dogs}", (WRONG, "unit")),
        (r"5\text{ cats}", r"5\text{ black cats}", None),
        (r"5\text{ cm}", r"5\text{ units}", None),
        ("5 cm", "5", (RIGHT, "integer")),
        ("5m", "5", None),
        ("15", "12 3", (WRONG, "not_a_number")),
        ("15", "fifteen", (RIGHT, "integer")),
        ("1500000", r"1,5\text{ million}", (RIGHT, "integer")),
        ("15", r"\sqrt{225}", None),
        ("Evelyn", "15", None),
    ],
)
def test_verdicts_are_given_only_when_both_sides_are_sure(
    gold: str, predicted: str, expected: tuple[Verdict, str] | None
) -> None:
    assert compare_numbers(gold, predicted) == expected


ODD = "\\{}()[]^_$%&|<>=+-*/.,;:!'0159aex \n\t\x00\u066b\u0664\u2212\u00b2\u202e\ud7ff\U0001d7d8"
"""Of letters and signs of every kind; to list all of Unicode takes hypothesis two seconds."""


@settings(max_examples=20)
@given(st.text(alphabet="0123456789.,-+/ ^{}\\$%eEx=frac", max_size=40), st.text(ODD, max_size=40))
def test_no_text_makes_the_fast_path_raise(gold: str, predicted: str) -> None:
    compare_numbers(gold, predicted)
    compare_numbers("5", gold)
