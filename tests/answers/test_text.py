import pytest

from rocstar.answers.text import compare_text
from rocstar.types import Verdict

RIGHT, WRONG = Verdict.RIGHT, Verdict.WRONG


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        (r"\text{Evelyn}", "Evelyn", (RIGHT, "text")),
        ("x^2", "x2", None),
        ("1 2", "12", None),
        ("$", "$$", None),
        ("B", r"\text{(B)}", (RIGHT, "choice")),
        ("(B)", "B. 12 apples", (RIGHT, "choice")),
        ("B", "option B", (RIGHT, "choice")),
        ("B", "(b)", (RIGHT, "choice")),
        ("B", "C) 12", (WRONG, "choice")),
        ("B", "12", None),
        ("B", "Because", None),
        ("E", r"\mathrm{E}*2", None),
        ("E", "a", (WRONG, "choice")),
        ("12", "B", None),
        ("C", "C'", None),
        ("(E) 24", "E", (RIGHT, "choice")),
        ("(E) 24", "(D) 24", (WRONG, "choice")),
        ("(E) 24", "(E) 25", None),
        ("trapezoid", r"\text{A trapezoid.}", (RIGHT, "text")),
        ("trapezoid", r"\text{an isosceles trapezoid}", None),
        ("salt and pepper", "pepper and salt", (RIGHT, "text")),
        ("salt and pepper", "salt or pepper", (WRONG, "text")),
        ("no", "No, it diverges", (RIGHT, "text")),
        ("no", "No, unless n is even", None),
        ("nretnal", "lantern", (WRONG, "text")),  # no product
        ("New York", "York New", (WRONG, "text")),
        ("hello", "Hello", (RIGHT, "text")),
        ("ABCD", "BCDA", None),
        ("stop", "start", None),
        ("2026-04-03", "2026-03-04", (WRONG, "text")),  # no difference
        ("2026-04-03", "2019", (WRONG, "text")),
        ("2026-04-03", "2026-4-3", (RIGHT, "text")),
        ("2026-04-03", "3 April 2026", None),
        ("192.168.0.1", "192.168.0.10", (WRONG, "text")),
        ("06:30", "02:10", (WRONG, "text")),  # no ratio
        ("00:15", "0", (WRONG, "text")),
        ("06:30", "6:30", (RIGHT, "text")),
        ("1:2", "2:4", None),
        ("12:30", "6:15", (WRONG, "text")),  # no ratio: it could be reduced
        ("12:30", "0.4", (WRONG, "text")),
        ("13:30", "26:60", None),
        ("09:30", "9:30 p.m.", (WRONG, "text")),
        ("09:30", "9:30 am", None),
    ],
)
def test_words_and_choices_are_settled_only_when_sure(
    gold: str, predicted: str, expected: tuple[Verdict, str] | None
) -> None:
    assert compare_text(gold, predicted) == expected
