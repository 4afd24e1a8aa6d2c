import asyncio
from collections.abc import Sequence

import pytest

from rocstar.answers.caps import MAX_CHARS
from rocstar.answers.grade import Grade, Grader, Pair
from rocstar.answers.symbolic import Found, Question, SymbolicChecker
from rocstar.errors import ConfigError, VerifierUnavailable
from rocstar.types import Verdict

RIGHT, WRONG, UNDECIDED = Verdict.RIGHT, Verdict.WRONG, Verdict.UNDECIDED


class Told(SymbolicChecker):
    """Says `prime` to everything; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Question] = []

    async def compare(self, questions: Sequence[Question]) -> list[Found | VerifierUnavailable]:
        self.asked += questions
        return [
            VerifierUnavailable("out of order.") if question.predicted == "lost" else (RIGHT, "prime")
            for question in questions
        ]


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict", "method"),
    [
        ("18", "18", RIGHT, "integer"),
        ("18", "17", WRONG, "integer"),
        ("18", "abc", WRONG, "not_a_number"),
        ("18", "1\u200f8\u202c", RIGHT, "integer"),
        ("-18", "\u221218", RIGHT, "integer"),
        ("0.5", r"\frac{1}{2}", RIGHT, "number"),
        (r"\text{Evelyn}", "Evelyn", RIGHT, "text"),
        (r"\left( 3, \dfrac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )", RIGHT, "text"),
        ("B", r"\text{(B)}", RIGHT, "choice"),
        ("18", None, WRONG, "no_answer"),
        ("18", " ", WRONG, "no_answer"),
        ("18", "1+" * MAX_CHARS, WRONG, "too_long"),
        ("x", "(" * 100 + "x" + ")" * 100, WRONG, "too_deep"),
        ("x", "9^{9^{9^{9}}}", WRONG, "too_big"),
        ("9^{9^{9^{9}}}", "9^{9^{9^{9}}}", RIGHT, "text"),
        ("x+" * MAX_CHARS, "x", UNDECIDED, "too_long"),
        ("x+" * MAX_CHARS, "x+" * MAX_CHARS, RIGHT, "text"),
    ],
)
async def test_cheap_rules_settle_cheap_questions(
    gold: str, predicted: str | None, verdict: Verdict, method: str
) -> None:
    checker = Told()
    grade = await Grader(checker).grade(gold, predicted)
    assert (grade.verdict, grade.method) == (verdict, method) and not checker.asked


async def test_symbolic_graders_are_asked_together_in_the_order_they_are_named() -> None:
    checker = Told()
    grader = Grader(checker, graders=("math_verify", "prime"))
    assert (await grader.grade("5", "5 ")).method == "prime"
    assert checker.asked == [Question(graders=("math_verify", "prime"), gold="5", predicted="5")]


async def test_without_a_grader_that_knows_nothing_is_decided() -> None:
    assert (await Grader(Told(), graders=("numbers",)).grade("x", "y")).method == "unsure"


def test_an_unknown_grader_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="numbers, text, prime, math_verify"):
        Grader(Told(), graders=("maths",))


async def test_a_whole_step_is_one_call_in_order() -> None:
    checker = Told()
    pairs = [Pair(gold="1", predicted="1"), Pair(gold="x", predicted="y"), Pair(gold="1", predicted=None)]
    grades = await Grader(checker).grade_all(pairs)
    assert [grade.method for grade in grades[:2]] == ["integer", "prime"] and len(checker.asked) == 1
    assert grades[2] == Grade(WRONG, "no_answer", None)
    assert await Grader(checker).grade_all([]) == []


async def test_a_failure_of_ours_stands_in_its_place_and_the_others_have_their_grades() -> None:
    pairs = [Pair(gold="x", predicted="y"), Pair(gold="x", predicted="lost"), Pair(gold="1", predicted="1")]
    first, lost, last = await Grader(Told()).grade_each(pairs)
    assert isinstance(lost, VerifierUnavailable)
    assert isinstance(first, Grade) and isinstance(last, Grade)
    with pytest.raises(VerifierUnavailable, match="out of order"):
        await Grader(Told()).grade_all(pairs)


def test_it_can_be_asked_without_an_event_loop_and_inside_a_running_one() -> None:
    grader = Grader(Told())

    async def inside() -> list[Grade]:
        return grader.grade_now([Pair(gold="1", predicted="1")])

    assert asyncio.run(inside()) == grader.grade_now([Pair(gold="1", predicted="1")])
