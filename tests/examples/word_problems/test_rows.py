"""Word problems as rows, problems and demonstrations; then the promises that hold on the real files."""

from __future__ import annotations

import gzip
import io
import random
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from rocstar.errors import DataError
from tests.published import WORD_PROBLEMS, needs_word_problems
from word_problems import rows as wp
from word_problems.expressions import exact, parse_prefix
from word_problems.variations import Variation, training_rows
from word_problems.wording import things, with_decoy, with_story_shuffled, with_things_renamed

ROW = wp.WordProblem(
    template="tom has number0 boxes of number1 pens . he saw number2 cats . how many pens has he ?",
    numbers=(8, 4, 3),
    tree=parse_prefix("* number0 number1"),
    answer=32,
    source="here",
)


def printed(code: str) -> str:
    """What the program really prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue()


def test_a_row_in_digits_and_masked() -> None:
    digits, masked = wp.to_problem(ROW), wp.to_problem(ROW, "masked")
    assert digits.question == "tom has 8 boxes of 4 pens . he saw 3 cats . how many pens has he ?"
    assert masked.question == "tom has n0 boxes of n1 pens . he saw n2 cats . how many pens has he ?"
    assert digits.answer == masked.answer == "32"
    assert digits.metadata == {"template": ROW.template, "operators": 1, "unused_numbers": 1}
    assert (wp.given(digits), wp.given(masked)) == ("", "n0=8;n1=4;n2=3\n")
    assert masked.id != wp.to_problem(replace(ROW, numbers=(9, 4, 3), answer=36), "masked").id
    assert wp.inline_program(ROW, "digits") == "print(8*4)"
    assert wp.inline_program(ROW, "masked") == wp.bound_program(ROW, "masked") == "print(n0*n1)"
    assert wp.bound_program(ROW, "digits") == "n0=8;n1=4;n2=3\nprint(n0*n1)"


def test_an_inconsistent_row_keeps_the_answer_of_its_file_and_does_not_teach() -> None:
    wrong = replace(ROW, answer=33)
    assert wp.consistent([ROW, wrong]) == [ROW]
    assert wp.to_problem(wrong).answer == "33"
    assert not replace(ROW, tree=parse_prefix("/ number0 0")).is_consistent


def test_an_answer_rounded_in_the_file_is_given_in_full() -> None:
    row = replace(ROW, tree=parse_prefix("/ number0 number2"), answer=exact("2.667"))
    assert wp.to_problem(row).answer == repr(8 / 3)


def test_a_demonstration_shows_what_its_program_prints_and_copies_it_where_it_goes_on() -> None:
    code = wp.inline_program(ROW, "digits")
    whole, call = (wp.demonstrate(ROW, code, "digits", answers=answers) for answers in (True, False))
    assert '"code": "print(8*4)"' in whole.turns[0].text == call.turns[0].text
    assert whole.turns[0].results[0].stdout == printed(code) == "32\n"
    assert whole.turns[1].text == "<answer>\\boxed{32}</answer>"
    assert [turn.results for turn in call.turns] == [()]


def test_held_out_questions_take_their_repeats_with_them() -> None:
    rows = [replace(ROW, template=f"question {n % 6} number0 number1 number2 ?", source=str(n)) for n in range(12)]
    train, dev = wp.held_out(rows, 2, seed=0)
    assert (len(train), len(dev)) == (8, 2)
    assert not {row.template for row in train} & {row.template for row in dev}
    assert wp.held_out(rows, 2, seed=0) == (train, dev)
    with pytest.raises(ValueError, match=r"data\.options\.holdout 6 leaves nothing"):
        wp.held_out(rows, 6, seed=0)


# Files

HEADER = "Question,Numbers,Equation,Answer\n"
GOOD = "Tom has number0 pens,8.0,+ number0 1.0,9.0\n"


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text(HEADER + GOOD)
    (tmp_path / "few.csv.gz").write_bytes(gzip.compress((HEADER + GOOD).encode()))
    row = replace(ROW, template="tom has number0 pens", numbers=(8,), tree=parse_prefix("+ number0 1.0"), answer=9)
    for name in ("few.csv", "few.csv.gz"):
        assert wp.read_word_problems(tmp_path / name) == [replace(row, source="few")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Question,Numbers,Answer\n", "line 1, field Equation is missing"),
        (HEADER + GOOD + "Tom has number0 pens,eight,number0,8\n", "line 3, field Numbers .*'eight' is not a decimal"),
        (HEADER + "Tom has number1 pens,8,number0,8\n", "line 2, field Question must mask all 1 entries"),
        (HEADER + "Tom has number0 pens,8,+ number0,8\n", "line 2, field Equation .*operand is missing"),
        (HEADER + "Tom has number0 pens,8,number3,8\n", "line 2, field Equation uses number3, but Numbers lists 1"),
        (HEADER + "Tom has number0 pens,8,number0,many\n", "line 2, field Answer .*'many'"),
        (HEADER + "Tom has number0 pens,8\n", "line 2, field Equation"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"bad\.csv, {complaint}"):
        wp.read_word_problems(path)


@pytest.mark.parametrize(
    "content", [None, b"\x1f\x8bbroken", b"\xff\xfe\x00", gzip.compress(b"x" * 9999, mtime=0)[:40]], ids=str
)
def test_an_unreadable_file_is_one_plain_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.csv.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.csv\.gz cannot be read"):
        wp.read_word_problems(path)


# The real files


@needs_word_problems
def test_every_program_on_redrawn_and_reworded_numbers_prints_the_value_of_its_tree() -> None:
    train = wp.read_word_problems(WORD_PROBLEMS / "mawps_asdiv_a_train.csv.gz")
    rows = wp.consistent(train)
    assert (len(train), len(rows)) == (3138, 3130)
    words, rng = things(rows[:200]), random.Random(0)
    for row in rows[:200]:
        new = with_story_shuffled(with_things_renamed(with_decoy(row, words, rng), words, 0.5, rng), rng)
        assert new.is_consistent and new.value == row.value
    variation = Variation(original_share=0.1, distractor_share=0.2, swap_share=0.5)
    some = rows[::16]
    for row in training_rows(some, len(some), variation, seed=0):
        output = wp.demonstrate(row, "", "digits").turns[0].results[0].stdout
        assert row.value is not None and float(output) == pytest.approx(float(row.value), rel=1e-9)
        masked = wp.to_problem(row, "masked")
        assert printed(wp.inline_program(row, "digits")) == output
        assert printed(wp.bound_program(row, "digits")) == output
        assert printed(wp.given(masked) + wp.inline_program(row, "masked")) == output
