import json
from fractions import Fraction
from pathlib import Path

import pytest

from rocstar.answers.cases import load_cases, pair_of
from rocstar.answers.grade import Grader, Pair
from rocstar.answers.tolerance import compare_within, parse_tolerance
from rocstar.data.rows import read_rows
from rocstar.errors import DataError
from rocstar.types import Verdict

RIGHT, WRONG = (Verdict.RIGHT, "tolerance"), (Verdict.WRONG, "tolerance")


@pytest.mark.parametrize(
    ("gold", "predicted", "tolerance", "expected"),
    [
        ("0.003", "0.002", "1e-3", RIGHT),
        ("0.003", "0.0019", "1e-3", WRONG),
        ("2.5", "\\frac{51}{20}", "0.05", RIGHT),
        ("2 \\times 10^{9}", "2.1 \\cdot 10^{9}", "1e8", RIGHT),
        ("2 \\times 10^{9}", "2.1 \\cdot 10^{9}", "9e7", WRONG),
        ("2 \\times 10^{9}, 0.2", "0.1, 2.1 \\cdot 10^{9}", "1e8, 0.1", RIGHT),
        ("2 \\times 10^{9}, 0.2", "0.1, 2.1 \\cdot 10^{9}", "0.1, 1e8", WRONG),
        ("(0.1, 0.5)", "(0.5, 0.1)", "0.1", WRONG),
        ("(0.1, 0.5)", "(0.2, 0.4)", "0.1", RIGHT),
        ("0.1, 0.5", "0.1", "0.1", WRONG),
        ("1, 2", "2, 2.5", "1", RIGHT),  # 2 must leave the nearer partner to the other
        ("x + 1", "x + 1", "0.1", None),
        ("0.1", "one tenth", "0.1", None),
        ("5 m", "5 s", "0.1", None),
        ("10%", "0.1", "0.1", None),
        ("0.1, 0.2, 0.3", "0.1, 0.2, 0.3", "0.1, 0.1", None),
    ],
)
def test_numbers_agree_within_what_was_published(
    gold: str, predicted: str, tolerance: str, expected: tuple[Verdict, str] | None
) -> None:
    assert compare_within(gold, predicted, parse_tolerance(tolerance)) == expected


def test_a_tolerance_is_read_from_what_files_hold() -> None:
    assert parse_tolerance("1e-3") == parse_tolerance(0.001) == parse_tolerance([0.001]) == (Fraction(1, 1000),)
    assert parse_tolerance("1e34, 0.25") == (Fraction(10**34), Fraction(1, 4))
    assert parse_tolerance(None) == parse_tolerance("") == ()
    for bad in ("x", -1, True, {"a": 1}, float("nan"), float("inf"), "1,,2", "1e999999999"):
        with pytest.raises((ValueError, OverflowError)):
            parse_tolerance(bad)


async def test_it_comes_before_the_exact_graders_and_leaves_to_them_what_is_no_number() -> None:
    grader = Grader(graders=("numbers", "text"))
    found = await grader.grade_all(
        [
            Pair(gold="5", predicted="5.001"),
            Pair(gold="5", predicted="5.001", tolerance=(Fraction(1, 100),)),
            Pair(gold="none", predicted="none", tolerance=(Fraction(1, 100),)),
        ]
    )
    assert [(one.verdict, one.method) for one in found] == [(Verdict.WRONG, "number"), RIGHT, (Verdict.RIGHT, "text")]


def test_a_column_of_a_file_holds_it_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "5.1", "gold": "5", "error": "0.1"}, {"text": "5", "gold": "5"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_cases(path, read_rows(path), tolerance="error")
    assert (pair_of(first).tolerance, pair_of(second).tolerance) == ((Fraction(1, 10),), ())
    path.write_text(json.dumps(rows[0] | {"error": "tiny"}))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1, field 'error': expected a number .* got 'tiny'"):
        load_cases(path, read_rows(path), tolerance="error")
