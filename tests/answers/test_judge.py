"""How several graders are fused, in this process, with graders that say what they are told."""

import pytest

from rocstar.answers import judge
from rocstar.answers.judge import Found, fused
from rocstar.types import Verdict

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED
ACCEPTS, REJECTS, UNREAD = (RIGHT, "one"), (WRONG, "other"), (UNDECIDED, "gold_unparsed")


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (ACCEPTS, REJECTS, ACCEPTS),
        (REJECTS, ACCEPTS, ACCEPTS),
        (UNREAD, ACCEPTS, ACCEPTS),
        (REJECTS, REJECTS, REJECTS),
        (UNREAD, REJECTS, REJECTS),
        (REJECTS, UNREAD, REJECTS),
        (UNREAD, UNREAD, UNREAD),
        ((WRONG, "value"), ACCEPTS, (WRONG, "value")),
    ],
)
def test_either_may_accept_and_two_numbers_that_differ_end_it(
    first: Found, second: Found, together: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "GRADERS", {"a": lambda *given: first, "b": lambda *given: second})
    assert fused(("a", "b"), "x", "y") == together


def test_a_library_that_rounds_does_not_make_two_numbers_equal() -> None:
    question = {"gold": "1/2004!", "predicted": "1/2005!"}
    assert judge.judge({**question, "graders": ["math_verify"]})[0] is RIGHT
    assert judge.judge({**question, "graders": ["prime", "math_verify"]}) == (WRONG, "value")


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict"),
    [
        (r"\gcd(n, p-1)", r"\gcd(n, p-4)", UNDECIDED),
        (r"\gcd(n, p-1)", r"\gcd(n,p-1)", RIGHT),
        (r"1 \not\in S", r"1 \in S", UNDECIDED),
        ("42", r"\gcd(3,5)", WRONG),
        ("42", r"\not 42", WRONG),
        (r"\{1,2,\ldots\}", r"\{1,2,\ldots\}", RIGHT),
    ],
)
def test_what_the_parser_would_lose_is_compared_as_text(gold: str, predicted: str, verdict: Verdict) -> None:
    question = {"gold": gold, "predicted": predicted, "graders": ["prime", "math_verify"]}
    assert judge.judge(question)[0] is verdict
