import pytest

from rocstar.answers.grade import MAX_CHARS, Grade, Grader, plain_text
from rocstar.answers.symbolic import SymbolicChecker
from rocstar.types import Verdict


class Forbidden(SymbolicChecker):
    """Stands where a question must be settled without symbolic mathematics."""

    async def compare(self, gold: str, predicted: str, *, prose: bool = False) -> tuple[Verdict, str]:
        raise AssertionError(f"{predicted!r} against {gold!r} was sent to the symbolic process")


@pytest.mark.parametrize(
    ("gold", "predicted", "verdict", "method"),
    [
        ("18", "18", Verdict.RIGHT, "integer"),
        ("18", "17", Verdict.WRONG, "integer"),
        ("18", "abc", Verdict.WRONG, "not_a_number"),
        ("0.5", r"\frac{1}{2}", Verdict.RIGHT, "number"),
        (r"\text{Evelyn}", "Evelyn", Verdict.RIGHT, "text"),
        (r"\left( 3, \dfrac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )", Verdict.RIGHT, "text"),
        ("18", None, Verdict.WRONG, "no_answer"),
        ("18", " ", Verdict.WRONG, "no_answer"),
        ("18", "1+" * MAX_CHARS, Verdict.WRONG, "too_long"),
        ("x+" * MAX_CHARS, "x", Verdict.UNDECIDED, "too_long"),
        ("x+" * MAX_CHARS, "x+" * MAX_CHARS, Verdict.RIGHT, "text"),
    ],
)
async def test_cheap_rules_settle_cheap_questions(
    gold: str, predicted: str | None, verdict: Verdict, method: str
) -> None:
    grade = await Grader(Forbidden()).grade(gold, predicted)
    assert (grade.verdict, grade.method) == (verdict, method)


async def test_no_answer_has_nothing_extracted() -> None:
    assert await Grader(Forbidden()).grade("1", "") == Grade(Verdict.WRONG, "no_answer", None)


def test_empty_plain_texts_are_no_agreement() -> None:
    assert plain_text("$") == plain_text("$$") == ""


async def test_looks_of_latex_do_not_decide_two_different_answers() -> None:
    assert plain_text("1 2") != plain_text("12")
    assert plain_text("x^2") != plain_text("x2")
