"""Word problems as rows, problems and demonstrations; then the promises that hold on the real files."""

from __future__ import annotations

import gzip
import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from rocstar.errors import DataError
from tests.published import WORD_PROBLEMS, needs_word_problems
from word_problems import rows as wp
from word_problems.expressions import exact, parse_prefix
from word_problems.variations import Variation, training_demonstrations, training_problems, training_rows

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


def test_programs_inline_and_bound() -> None:
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


@pytest.mark.parametrize("answers", [True, False])
def test_a_demonstration_shows_what_its_program_prints(answers: bool) -> None:
    demo = wp.demonstrate(ROW, wp.inline_program(ROW, "digits"), "digits", answers=answers)
    assert '"code": "print(8*4)"' in demo.turns[0].text
    if answers:
        assert demo.turns[0].results[0].stdout == printed("print(8*4)") == "32\n"
        assert demo.turns[1].text == "<answer>\\boxed{32}</answer>"
    else:
        assert [turn.results for turn in demo.turns] == [()]


def test_held_out_questions_take_their_repeats_with_them() -> None:
    rows = [replace(ROW, template=f"question {n % 6} number0 number1 number2 ?", source=str(n)) for n in range(12)]
    train, dev = wp.held_out(rows, 2, seed=0)
    assert len(dev) == 2
    assert len(train) == 8
    assert not {row.template for row in train} & {row.template for row in dev}
    assert wp.held_out(rows, 2, seed=0) == (train, dev)
    with pytest.raises(ValueError, match=r"data\.options\.holdout 6 leaves nothing"):
        wp.held_out(rows, 6, seed=0)


# Files

HEADER = "Question,Numbers,Equation,Answer\n"
GOOD = "Tom has number0 pens ,8.0,+ number0 1.0,9.0\n".replace(" ,", ",")


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text(HEADER + GOOD, encoding="utf-8")
    (tmp_path / "few.csv.gz").write_bytes(gzip.compress((HEADER + GOOD).encode()))
    row = wp.WordProblem(
        template="tom has number0 pens", numbers=(8,), tree=parse_prefix("+ number0 1.0"), answer=9, source="few"
    )
    assert wp.read_word_problems(tmp_path / "few.csv") == wp.read_word_problems(tmp_path / "few.csv.gz") == [row]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Question,Numbers,Answer\n", "line 1, field Equation is missing"),
        (HEADER + GOOD + "Tom has number0 pens,eight,number0,8\n", "line 3, field Numbers .*'eight' is not a decimal"),
        (HEADER + "Tom has number1 pens,8,number0,8\n", "line 2, field Question must mask all 1 entries"),
        (HEADER + "Tom has pens,,3.0,3\n", ""),
        (HEADER + "Tom has number0 pens,8,+ number0,8\n", "line 2, field Equation .*operand is missing"),
        (HEADER + "Tom has number0 pens,8,number3,8\n", "line 2, field Equation uses number3, but Numbers lists 1"),
        (HEADER + "Tom has number0 pens,8,number0,many\n", "line 2, field Answer .*'many'"),
        (HEADER + "Tom has number0 pens,8\n", "line 2, field Equation"),
    ],
)
def test_a_bad_row_names_file_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    if not complaint:
        assert len(wp.read_word_problems(path)) == 1
        return
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


@pytest.fixture(scope="module")
def train() -> list[wp.WordProblem]:
    return wp.read_word_problems(WORD_PROBLEMS / "mawps_asdiv_a_train.csv.gz")


@needs_word_problems
def test_every_program_on_redrawn_numbers_prints_the_value_of_its_tree(train: list[wp.WordProblem]) -> None:
    assert (len(train), len(wp.consistent(train))) == (3138, 3130)
    rows = wp.consistent(train)[::5]
    variation = Variation(original_share=0.1, distractor_share=0.2, swap_share=0.5)
    for row in training_rows(rows, len(rows), variation, seed=0):
        output = wp.demonstrate(row, "", "digits").turns[0].results[0].stdout
        assert row.value is not None
        assert float(output) == pytest.approx(float(row.value), rel=1e-9)
        masked = wp.to_problem(row, "masked")
        assert printed(wp.inline_program(row, "digits")) == output
        assert printed(wp.bound_program(row, "digits")) == output
        assert printed(wp.given(masked) + wp.inline_program(row, "masked")) == output


@needs_word_problems
def test_demonstrations_and_problems_come_in_the_number_asked_for(train: list[wp.WordProblem]) -> None:
    rows = wp.consistent(train)[:100]
    demos = training_demonstrations(rows, 400, numbers="masked", variation=Variation(), seed=0)
    assert len(demos) == 400
    assert sum(len(demo.turns) == 2 for demo in demos) / 400 == pytest.approx(0.25, abs=0.08)
    problems = training_problems(rows, 300, numbers="digits", variation=Variation(), seed=0)
    assert len({problem.id for problem in problems}) > 250
