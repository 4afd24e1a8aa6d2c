"""A policy that may write anything gains nothing by an answer that is not right: against references that can be read,
no prediction is UNDECIDED, which would take its attempt out of its group, and none is RIGHT."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator

import pytest

from rocstar.answers.grade import Grader, Pair
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.types import Verdict

# fmt: off
REFERENCES = (
    "42", "-7", "1/3", "\\frac{22}{7}", "x^2+1", "\\sqrt{5}", "(1, 2)", "[0,1)", "2\\pi", "even", "true", "B", "20!",
    "61\\%", "\\{3,5\\}", "\\pm\\sqrt{13}", "y=3x+11", "37\\text{ km/h}", "\\begin{pmatrix}3&5\\\\7&11\\end{pmatrix}",
    "41^\\circ",
)
# fmt: on
"""No hostile answer below is equal to one of them."""
COUNT = int(os.environ.get("ROCSTAR_HOSTILE", "100"))  # 5000 take two minutes of one core
DEEP_EVERY = 50  # a parser of ambiguous grammar takes exponential time for them
BROKEN = (
    "\\not {}",
    "\\frac{{{}",
    "\\foo{{{}}}",
    "{}\\",
    "\\left({}",
    "${}",
    "\\text{{{}",
    "{}\\over",
    "\\begin{{x}}{}",
    "_{}^",
)
CALLS = (
    "\\gcd({},5)",
    "\\operatorname{{lcm}}({},9)",
    "f({})",
    "\\det({})",
    "\\int_0^{{{}}} x\\,dx",
    "\\sum_{{n=1}}^{{{}}} n^3",
)
CODE = ("__import__('os').system('{}')", "print({})", "eval('{}')", "lambda: {}", "'{}'*9**9", "while True: {}")
TALK = (
    "either {} or {}",
    "I do not know, {}",
    "the grader should accept {}",
    "any of {}, {}",
    "{} (or not)",
    "UNDECIDED {}",
)
UNICODE = ("\u202e{}", "{}\u0000x", "\u2466{}", "\U0001d7d8\u0338{}", "{}\u20e0", "\ud7ff{}", "{} \u2248 \u221e")


def number(rng: random.Random) -> str:
    """None of them is a reference, and neither is a sum or a product of small powers of them."""
    return str(rng.choice((101, 1009, 10007, 99991)) * rng.choice((1, 13, 1013)))


def big(rng: random.Random) -> str:
    n = number(rng)
    return rng.choice(
        (
            "10^{{{}}}",
            "{}!",
            "9^{{9^{{{}}}}}",
            "({}!)!",
            "{}^{{{}}}",
            "\\binom{{{}}}{{50}}",
            "2^{{-{}}}",
            "e^{{e^{{{}}}}}",
        )
    ).format(n, n)


def deep(rng: random.Random) -> str:
    return rng.choice(("({})", "\\sqrt{{{}}}", "\\frac{{1}}{{{}}}", "{{{}}}", "|{}|", "\\sin({})")).format(
        deep(rng) if rng.random() < 0.9 else number(rng)
    )


def long(rng: random.Random) -> str:
    return rng.choice(("+", ",", "\\cup", " ", "\\cdot ", "^", "/")).join(
        number(rng) for _ in range(rng.randrange(2, 300))
    )


def noise(rng: random.Random) -> str:
    return "".join(
        rng.choice("\\{}()[]^_$%&#~!|<>=+-*/.,;:'\"`0123456789abxyz \n\t") for _ in range(rng.randrange(1, 60))
    )


def filled(forms: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(forms).format(number(rng), number(rng))


KINDS = (big, long, noise, *(filled(forms) for forms in (BROKEN, CALLS, CODE, TALK, UNICODE)))


def hostile(seed: int) -> Iterator[Pair]:
    rng = random.Random(seed)
    for n in range(COUNT):
        text = deep(rng) if n % DEEP_EVERY == 0 else KINDS[n % len(KINDS)](rng)
        if rng.random() < 0.3:
            text = rng.choice(("{}, {}", "{} = {}", "\\{{{}, {}\\}}", "({}; {})")).format(
                text, KINDS[rng.randrange(len(KINDS))](rng)
            )
        yield Pair(gold=rng.choice(REFERENCES), predicted=text)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """One for all: its worker takes longer to start than to find most answers wrong."""
    made = Grader(SymbolicChecker(deadline_seconds=0.3))
    yield made
    asyncio.run(made.close())


@pytest.mark.slow
def test_nothing_hostile_is_right_or_undecided(grader: Grader) -> None:
    pairs = list(hostile(0))
    grades = zip(pairs, asyncio.run(grader.grade_each(pairs)), strict=True)
    escaped = [(pair, grade) for pair, grade in grades if getattr(grade, "verdict", None) is not Verdict.WRONG]
    assert not escaped, escaped[:5]


def test_an_answer_that_cannot_be_computed_is_wrong(grader: Grader) -> None:
    uncomputed = ("false", "10^{100000}", "30000!", "\\gcd(3,5)", "\\not 5", "9^{9^{9}}+1", "\\int_0^1 x^{x^{x^x}}dx")
    references = ("42", "\\frac{1}{2}", "x+1", "e^e", "true")
    pairs = [Pair(gold=gold, predicted=text) for gold in references for text in uncomputed]
    grades = zip(pairs, asyncio.run(grader.grade_all(pairs)), strict=True)
    assert [(pair, grade) for pair, grade in grades if grade.verdict is not Verdict.WRONG] == []
