import pytest

from rocstar.data.pool.rewording import in_other_words
from rocstar.types import Problem, problem_id


def problem(question: str) -> Problem:
    return Problem(id=problem_id(question), question=question, answer="7", metadata={"line": 1})


@pytest.mark.parametrize(
    ("question", "names", "afterwards"),
    [
        (
            "It is $\\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers. Find $m+n$.",
            ["coprime"],
            "It is $\\frac{m}{n}$, for coprime positive integers $m$ and $n$. Find $m+n$.",
        ),
        (
            "The integers $p, q, r$ are positive and $p$ and $r$ are relatively prime.",
            ["coprime"],
            "The integers $p, q, r$ are positive and $p$ and $r$ are coprime.",
        ),
        (
            "Here $a$ and $b$ are integers and $b$ is not divisible by the square of any prime number.",
            ["squarefree"],
            "Here $a$ and $b$ are integers and $b$ is free of repeated prime factors.",
        ),
        (
            "Let $[x]$ be the greatest integer less than or equal to $x$.",
            ["floor"],
            "Let $[x]$ be the largest integer that does not exceed $x$.",
        ),
        (
            "What is $a$? Express your answer as a common fraction in lowest terms.\n\n[asy] draw(); [/asy]",
            ["fraction"],
            "What is $a$?\n\n[asy] draw(); [/asy]",
        ),
    ],
)
def test_an_instruction_is_said_in_other_words(question: str, names: list[str], afterwards: str) -> None:
    found = in_other_words(problem(question))
    assert found is not None
    assert (found.question, found.metadata["reworded"]) == (afterwards, names)
    assert (found.id, found.answer) == (problem_id(afterwards), "7")


@pytest.mark.parametrize(
    "question",
    [
        "Express $0.\\overline{12}$ as a common fraction.",
        "What is it? Express your answer to the nearest integer.",
        "What is it? Express your answer in base 6.",
        "What is it? Express your answer as a fraction of the whole, in percent.",
        "How many integers are divisible by the square of any prime below 5?",
    ],
)
def test_what_is_asked_is_never_touched(question: str) -> None:
    assert in_other_words(problem(question)) is None


def test_a_condition_between_where_and_the_names_stays_as_it_is() -> None:
    text = (
        "It is $a\\sqrt{b}/c$, where $b$ is prime, $a$ and $b$ are odd, and $a$ and $c$ are relatively prime integers."
    )
    found = in_other_words(problem(text))
    assert found is not None and found.question == text.replace("relatively prime", "coprime")
