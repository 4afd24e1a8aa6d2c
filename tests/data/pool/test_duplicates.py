import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocstar.data.pool.overlap import QuestionIndex, shingles, token_key, tokens

WORDS = [f"w{number}" for number in range(500)]
TEXT = (
    "Let $n$ be the least positive integer such that $n^2 + 3n - 7$ is divisible by $11$. Find the sum of its digits."
)


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[QuestionIndex]:
    with QuestionIndex(tmp_path / "seen.sqlite", near=0.7) as opened:
        yield opened


def test_the_same_or_nearly_the_same_text_is_found_and_told_from_one_with_another_answer(seen: QuestionIndex) -> None:
    assert seen.add("Find $\\dfrac{a}{b}$ if $ a=b $.", "1", "latex", form="1") is None
    match = seen.add(r"Find \( \frac{a}{b} \) if \(a = b\)", "1", "other latex", form="1")
    assert match is not None and match.exact and match.same_answer and match.name == "latex"
    assert seen.add("Compute $x + 3$ for $x = 4$.", "7", "plus", form="7") is None
    assert seen.add("Compute $x - 3$ for $x = 4$.", "1", "minus", form="1") is None, "another sign, another question"
    seen.add(TEXT, "5", "first", form="5")
    match = seen.add(TEXT, "6", "second", form="6")
    assert match is not None and match.exact and not match.same_answer and match.answer == "5"
    changed = TEXT.replace("Find", "Determine")
    match = seen.add(changed, "5", "third", form="5")
    assert match is not None and not match.exact and 0.7 <= match.likeness < 1
    assert seen.add(TEXT.replace("Find", "Name"), "7", "fourth", form="7") is None, "another answer, another question"


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        ("In $ABC$ let $AB=3$.", "In $A B C$ let $A B = 3$."),
        ("Find $2xy$.", "Find $2 x y$."),
        ("Find the three-digit number.", "Find  the three - digit\n\tnumber ."),
        ("Find \\(\\sqrt2\\).", "Find\u00a0\\( \\sqrt 2 \\)."),
        ("Find the half-life.", "Fi\u00adnd the\u200b half-life.\ufeff"),
    ],
)
def test_texts_that_differ_only_in_spacing_are_the_same(seen: QuestionIndex, text: str, spaced: str) -> None:
    assert seen.add(text, "5", "first", form="5") is None
    match = seen.add(spaced, "5", "second", form="5")
    assert match is not None and match.exact


@given(
    words=st.lists(
        st.from_regex(r"[a-z]{1,4}|[0-9]{1,3}|\\[a-z]{2,4}|[-+=()]", fullmatch=True), min_size=2, max_size=9
    ),
    spaces=st.lists(st.sampled_from(["", " ", "  ", "\n", "\u2009", "~", "\\,"]), min_size=9, max_size=9),
)
def test_only_a_space_that_parts_two_numbers_matters(words: list[str], spaces: list[str]) -> None:
    apart = " ".join(words)
    mixed = "".join(word + space for word, space in zip(words, spaces, strict=False)).strip()
    numbers = [re.findall(r"[0-9]+", text) for text in (apart, mixed)]
    commands = [re.findall(r"\\[a-z]+", text) for text in (apart, mixed)]
    if commands[0] == commands[1]:  # \\ab c is not \\abc
        assert (token_key(tokens(apart)) == token_key(tokens(mixed))) == (numbers[0] == numbers[1])


def test_the_sketch_finds_nearly_all_pairs_that_are_alike_enough(tmp_path: Path) -> None:
    rng = random.Random(7)
    found = wanted = 0
    with QuestionIndex(tmp_path / "seen.sqlite", near=0.7) as seen:
        for number in range(80):
            words = rng.choices(WORDS, k=60)
            edited = list(words)
            for place in rng.sample(range(60), 3):
                edited[place] = rng.choice(WORDS)
            first, second = (shingles(tokens(" ".join(text))) for text in (words, edited))
            seen.add(" ".join(words), "5", f"{number} first", form="5")
            match = seen.add(" ".join(edited), "5", f"{number} second", form="5")
            if len(first & second) / len(first | second) >= 0.7:
                wanted += 1
                found += match is not None and match.name == f"{number} first"
            else:
                assert match is None
    assert wanted > 25
    assert found >= 0.98 * wanted


def test_a_question_costs_no_more_where_more_questions_share_its_wording_and_answer(seen: QuestionIndex) -> None:
    steps = [0] * 10
    for number in range(1000):  # none is near another
        seen._database.set_progress_handler(partial(_count, steps, number // 100), 100)
        question = f"What are the last two digits of the sum of {number} and {7 * number} for row {3 * number} of all?"
        assert seen.add(question, "5", str(number), form="5") is None
    assert steps[9] < 1.5 * steps[2], f"the database's steps grow with the questions it holds: {steps}"


def _count(steps: list[int], place: int) -> None:
    steps[place] += 1
