import pytest

from rocstar.data.pool.overlap import BenchmarkIndex
from rocstar.types import Problem

LONG = "Alice has nine red apples and Bob takes away four of them before lunch today"
QUESTIONS = (LONG, "Compute $2+2$.", r"What is $f(1)+f(2)+f(3)$ if $f(x) = x^2 + 1$ for all real numbers?")


def index(*questions: str) -> BenchmarkIndex:
    """Of a benchmark b with these questions."""
    lines = enumerate(questions or QUESTIONS, start=1)
    return BenchmarkIndex(
        Problem(id=text, question=text, answer="", source="b", metadata={"line": line}) for line, text in lines
    )


@pytest.mark.parametrize("text", [LONG.upper(), LONG.replace(" ", "  ") + ".", "compute 2 + 2"])
def test_the_same_letters_and_digits_are_the_same_question(text: str) -> None:
    found = index().find(text)
    assert found is not None and found.exact


def test_eight_words_in_a_row_are_an_overlap_and_seven_are_not() -> None:
    words = LONG.split()
    eight = index().find(f"So {' '.join(words[2:10])} indeed, yes")
    assert eight is not None and not eight.exact
    assert eight.passage == " ".join(words[2:10]).lower()
    assert (eight.found.place, eight.shared) == ("b line 1", 1)
    assert index().find(f"So {' '.join(words[2:9])} indeed, yes") is None


def test_punctuation_latex_marks_and_width_do_not_hide_an_overlap() -> None:
    assert index().find("nine, red; apples and \\textbf Bob takes away four") is None
    assert index().find("X nine, red; apples and (Bob) takes away: four of, Y") is not None
    assert index().find("\uff4eine red apples and Bob takes away four of") is not None


def test_symbols_between_blanks_count_as_words_too() -> None:
    assert index("let a + b = c + d hold here").find("so let a + b = c + d then") is not None


def test_of_several_benchmark_questions_the_one_that_shares_most_is_named() -> None:
    start, rest = " ".join(LONG.split()[:9]), LONG
    found = index(start, rest).find(f"{LONG} and then some")
    assert found is not None and found.found.place == "b line 2"
    assert f'15 words in a row, "{LONG.lower()}", are in b line 2 too; 8 of 11 8-grams' in found.evidence


def test_the_longest_of_several_shared_passages_is_shown_and_a_very_long_one_is_cut() -> None:
    words = LONG.split()
    found = index().find(f"{' '.join(words[:8])} pears {' '.join(words[3:13])} figs {' '.join(words[5:14])}")
    assert found is not None and found.passage == " ".join(words[3:13]).lower()
    long = " ".join(f"w{number}" for number in range(40))
    told = index(long).find(f"{long} more")
    assert told is not None and '40 words in a row, "w0 ' in told.evidence and 'w15 …"' in told.evidence
