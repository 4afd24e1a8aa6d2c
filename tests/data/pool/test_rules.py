import pytest

from rocstar.data.pool.config import LimitsSection
from rocstar.data.pool.rules import RULES
from rocstar.types import Problem

BOUNDS = LimitsSection(max_answer_digits=15, max_question_chars=500)


def first(question: str, answer: str) -> str | None:
    """Name of the rule that drops the row; None when it is kept."""
    problem = Problem(id="", question=question, answer=answer)
    return next((name for name, rule in RULES.items() if rule(problem, BOUNDS)), None)


@pytest.mark.parametrize(
    ("rule", "question", "answer"),
    [
        ("empty", "?", "5"),
        ("empty", "How many?", " "),
        ("long_question", "How many? " * 100, "5"),
        ("picture", "In the diagram, ABC is a triangle. What is x?", "5"),
        ("picture", "Two squares are placed as shown. Find the area.", "5"),
        ("picture", "What is the area? ![](https://example.org/a.png)", "5"),
        ("proof", "Prove that the limit of $f$ is 1.", "1"),
        ("multi_part", "Let $n = 6$. (1) Find $n^2$. (2) Find $n^3$.", "36"),
        ("multi_part", "(a) How many matches are played?\n(b) How many are won?", "63"),
        ("multi_part", "Let $f(x)=x$. (I) Find $f(2)$; (II) Determine the range of $f$.", "2"),
        ("unverifiable", "Is 7 prime?", "Yes"),
        ("unverifiable", "Which is it? (A) 1 (B) 2", "\\text{(B)}"),
        ("unverifiable", "What happens?", "The particle never comes back again"),
        ("composite", "Find all roots.", "3,-3"),
        ("composite", "Find all such numbers.", "297,396,495"),
        ("composite", "Where?", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("composite", "When?", "2 \\text{ and } 5"),
        ("huge_answer", "How many ways?", "1009! \\cdot 2"),
        ("huge_answer", "How many ways?", "2^{4181}"),
        ("huge_answer", "How many ways?", "1" * 16),
        ("not_integer", "How much?", "\\gcd(n, p-1)"),
        ("not_integer", "How much?", "e^{x^2}"),
        ("not_integer", "How much?", "3.5"),
    ],
)
def test_a_rule_drops_what_it_is_named_for(rule: str, question: str, answer: str) -> None:
    assert first(question, answer) == rule


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How many ducks are there?", "18"),
        ("Find the area of the triangle. [asy] draw((0,0)--(1,0)--(0,1)--cycle); [/asy] as shown", "5"),
        ("The distances are shown in the table below. \\begin{array}{c} 1 \\end{array} What is the sum?", "5"),
        ("It takes two hours for the dough to proof. How many hours in all?", "5"),
        ("The first 30 numbers are shown below. Row 1: 2, 2. Row 2: 4, 4. What is the 50th?", "5"),
        ("Show that $n$ is odd and find the least $n$.", "5"),
        ("A function satisfies (i) $f(1)=1$ and (ii) $f(x)>0$ for all $x$. Find $f(2)$.", "5"),
        ("What is $f(1) + f(2)$? Here $(1)$ is a point.", "5"),
        ("How many integers are there?", "1,013"),
    ],
)
def test_an_ordinary_problem_is_kept(question: str, answer: str) -> None:
    assert first(question, answer) is None
